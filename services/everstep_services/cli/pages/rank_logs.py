"""What ranks wrote: from the files on this node, or the ends that are kept of those that failed."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec

from everstep.evidence.files import open_regular, read_regular
from everstep.observe.printable import printable_line
from everstep_services.agent.settings import AgentSettings
from everstep_services.cli.api.client import Api
from everstep_services.cli.cells import listed
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.machine.state import find_state_dir
from everstep_services.cli.output import print_json, print_line, say, schema

STREAMS = ("stdout", "stderr")
_LOOK_EVERY_S = 0.2
_PIECE = 1 << 20
"""What a terminal would obey, except for tabs and colours."""


@dataclass(frozen=True, slots=True)
class LogSelection:
    """Whose logs; None for all, and for the newest round."""

    job: str
    round: int | None = None
    ranks: tuple[int, ...] = ()
    node: str | None = None
    streams: tuple[str, ...] = STREAMS
    last: int | None = None
    """Only the last lines of each file, at most this number."""


class LogLine(NamedTuple):
    """One line of one rank."""

    round: int
    node: str
    rank: int
    stream: str
    text: str
    at: str | None = None
    """When its node saw it; known of lines from the log store."""


class RankFolder(msgspec.Struct):
    """The part of `about.json` that we read."""

    node: str = "-"
    rank: int = -1


@dataclass(slots=True)
class RankFile:
    """One stream of one rank, and how far it was read."""

    path: Path
    round: int
    node: str
    rank: int
    stream: str
    offset: int = 0
    rest: bytes = field(default=b"", repr=False)

    def lines(self, *, is_over: bool) -> Iterator[LogLine]:
        """What was written since the last time; a line without an end waits for it."""
        try:
            with open_regular(self.path) as file:
                file.seek(self.offset)
                while piece := file.read(_PIECE):
                    self.offset += len(piece)
                    *whole, self.rest = (self.rest + piece).split(b"\n")
                    yield from map(self._line, whole)
        except OSError as error:
            raise CliError(f"{self.path} cannot be read: {error.strerror}") from error
        if is_over and self.rest:
            yield self._line(self.rest)
            self.rest = b""

    def _line(self, data: bytes) -> LogLine:
        text = data.decode(errors="replace").removesuffix("\r")
        return LogLine(self.round, self.node, self.rank, self.stream, text)


def rank_files(log_dir: Path, wanted: LogSelection) -> list[RankFile]:
    """The files on this node that are wanted, by rank; none when the round is not here."""
    folder = log_dir / wanted.job
    number = newest_round(folder) if wanted.round is None else wanted.round
    files: list[RankFile] = []
    for path in (folder / f"round-{number}").glob("rank-*"):
        about = _about(path)
        if wanted.ranks and about.rank not in wanted.ranks:
            continue
        if wanted.node is not None and about.node != wanted.node:
            continue
        files += [
            RankFile(path / stream, number or 0, about.node, about.rank, stream)
            for stream in wanted.streams
            if (path / stream).is_file()
        ]
    return sorted(files, key=lambda file: (file.rank, file.stream != "stdout"))


def newest_round(folder: Path) -> int | None:
    """The last round that left files here."""
    names = (path.name.removeprefix("round-") for path in folder.glob("round-*"))
    return max((int(name) for name in names if name.isdecimal()), default=None)


def past_lines(files: Iterable[RankFile], last: int | None) -> Iterator[LogLine]:
    """What they hold now, file by file."""
    for file in files:
        lines = file.lines(is_over=True)
        yield from lines if last is None else deque(lines, maxlen=last)


def live_lines(
    log_dir: Path, wanted: LogSelection, *, sleep: Callable[[float], None] = time.sleep
) -> Iterator[LogLine]:
    """What they hold, and what is added, for ever; also of rounds that begin later."""
    files: dict[Path, RankFile] = {}
    while True:
        for file in rank_files(log_dir, wanted):
            files.setdefault(file.path, file)
        for file in files.values():
            yield from file.lines(is_over=False)
        # Looked at, not waited for: a shared file system tells nobody of what another node writes.
        sleep(_LOOK_EVERY_S)


def kept_lines(
    api: Api, wanted: LogSelection, note: Callable[[str], None] = say
) -> Iterator[LogLine]:
    """The ends of the logs of ranks that failed, whether or not their node is left.

    `note` gets a line that tells where they come from.
    """
    place = f"jobs/{quote(wanted.job, safe='')}/rounds"
    number = _failed_round(api, place, wanted, note)
    check_selection(api, wanted, number)
    exits = api.pages(f"{place}/{number}/exits", {"failed": "true", "limit": 200}, most=None)
    nodes = {row["rank"]: row["node"] for row in exits}
    ranks = wanted.ranks or tuple(sorted(nodes))
    count, problem = 0, None
    for rank in ranks:
        node = nodes.get(rank, "-")
        if wanted.node not in {None, node}:
            continue
        for stream in wanted.streams:
            try:
                text = api.text(f"{place}/{number}/ranks/{rank}/log", {"stream": stream})
            except CliError as error:
                if error.code is Exit.UNREACHABLE:
                    raise
                problem = error
                continue
            count += 1
            for line in deque(text.splitlines(), maxlen=wanted.last):
                yield LogLine(number, node, rank, stream, line)
    if not count:
        raise problem or CliError(f"nothing is kept of round {number}", Exit.NOT_FOUND)


def check_selection(api: Api, wanted: LogSelection, number: int) -> None:
    """Refuse ranks and a node that are not in the round: nothing of them would be printed."""
    from everstep_services.history.operator_requests import did_you_mean

    if not wanted.ranks and wanted.node is None:
        return
    place = f"jobs/{quote(wanted.job, safe='')}/rounds/{number}"
    try:
        round_ = api.get(place)
        nodes = [row["node"] for row in api.pages(f"{place}/members", {"limit": 1000}, most=None)]
    except CliError as error:
        if error.code is not Exit.NOT_FOUND:
            raise
        return  # the output of a round can be here before the round is on record
    size = round_["world_size"]
    wrong = [rank for rank in wanted.ranks if size is not None and rank >= size]
    if wrong:
        text = f"there is no rank {wrong[0]} in round {number} of {wanted.job}"
        raise CliError(f"{text}: its ranks are 0 to {size - 1}", Exit.NOT_FOUND)
    if wanted.node is not None and nodes and wanted.node not in nodes:
        text = f"there is no node {wanted.node[:128]} in round {number} of {wanted.job}"
        hint = did_you_mean(wanted.node, nodes) or f": its nodes are {listed(nodes, 8)}"
        raise CliError(f"{text}{hint}", Exit.NOT_FOUND)


def print_lines(
    invocation: Invocation, job: str, lines: Iterable[LogLine], *, is_live: bool = False
) -> None:
    """Each with its node and rank before it; for programs, each as a record."""
    match invocation.output:
        case "json":
            records = [_record(job, line) for line in lines]
            print_json({"schema": schema("log-line"), "items": records})
        case "jsonl":
            for line in lines:
                print_line(_record(job, line))
        case _:
            for line in lines:
                # Of a progress bar, what it showed last.
                shown = printable_line(line.text.rpartition("\r")[2])
                sys.stdout.write(f"{line.node}:{line.rank}| {shown}\n")
                if is_live:
                    sys.stdout.flush()


def _failed_round(api: Api, place: str, wanted: LogSelection, note: Callable[[str], None]) -> int:
    if wanted.round is not None:
        return wanted.round
    for row in api.pages(place, {"limit": 100}, most=1000):
        if row["ranks_failed"]:
            note(f"from the record: the ends of what failed ranks of round {row['round']} wrote")
            return int(row["round"])
    launcher = (api.get(f"jobs/{quote(wanted.job, safe='')}")["labels"] or {}).get("launcher")
    where = "on its nodes: run this there, or name the folder with --log-dir"
    if launcher:
        where = f"where {launcher}, which has started its ranks, has put them"
    raise CliError(
        f"no rank of {wanted.job} has failed, so nothing of its logs is kept in the record; the "
        f"whole of them is {where}",
        Exit.NOT_FOUND,
    )


def _about(folder: Path) -> RankFolder:
    """Whose files these are; from the folder's own name where nobody has said."""
    try:
        about = msgspec.json.decode(read_regular(folder / "about.json"), type=RankFolder)
    except (OSError, msgspec.DecodeError, msgspec.ValidationError):
        about = RankFolder()
    if about.rank < 0:
        name = folder.name.removeprefix("rank-")
        about.rank = int(name) if name.isdecimal() else -1
    return about


def _record(job: str, line: LogLine) -> dict[str, Any]:
    record = {"job": job, **line._asdict()}
    if line.at is None:
        del record["at"]
    return record


def log_folder(invocation: Invocation, chosen: Path | None) -> Path:
    if chosen is not None:
        return chosen.expanduser()
    settings = invocation.load({"agent": AgentSettings}).section(AgentSettings)
    state = find_state_dir(invocation.environ, invocation.state_dir)
    return settings.log_dir or state.path / "logs"


def not_here(folder: Path, wanted: LogSelection) -> CliError:
    which = "" if wanted.round is None else f" of round {wanted.round}"
    return CliError(
        f"{folder} has no such logs{which} of {wanted.job}: run this on a node of it, name the "
        f"folder with --log-dir, or the API with --api for what is kept of failed ranks",
        Exit.NOT_FOUND,
    )
