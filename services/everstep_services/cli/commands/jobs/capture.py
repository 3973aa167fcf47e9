"""Collect evidence of a job that runs, and fetch it: stacks, flight recorders and more."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import click

from everstep.evidence import archive
from everstep.evidence.archive import BadArchiveError
from everstep.ids import new_id
from everstep.messages.facts.incidents import CAPTURE
from everstep.subjects import is_name
from everstep_services.agent.settings import KINDS
from everstep_services.cli.api.client import Api, Params
from everstep_services.cli.cells import aligned, cell
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation, NumberRange
from everstep_services.cli.job_argument import with_job_at_work
from everstep_services.cli.operator_requests import with_reason
from everstep_services.cli.output import echo, print_record


@click.command()
@with_job_at_work
@click.option(
    "--rank", "ranks", type=click.IntRange(0), multiple=True, metavar="N",
    help="Only evidence of this global rank; may be given several times.",
)  # fmt: skip
@click.option(
    "--kind", "kinds", multiple=True, metavar="KIND",
    help="Only this kind of evidence, as stacks or flight_recorder; may be given several times.",
)  # fmt: skip
@click.option(
    "--into", "folder", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="The folder to fetch the evidence into (by default capture-ID, here).",
)  # fmt: skip
@click.option(
    "--within", "within_s", type=NumberRange(0, 60, min_open=True), default=10.0,
    metavar="SECONDS",
    help="How long to wait; evidence that has not arrived by then is reported as missing (10).",
)  # fmt: skip
@with_reason
def command(
    invocation: Invocation, /, *, job: str, folder: Path | None, reason: str, **asked: Any
) -> int:
    """Have agents collect evidence of the running ranks of a job, and fetch it.

    The ranks continue, and nothing is counted as an incident. Each piece is printed with its
    summary and its file, or with the reason why it is missing. `everstep fr analyze` then reads
    DIR/flight_recorder, and `everstep stacks analyze` reads DIR/stacks.

    Exit codes: 0 every node has answered, 5 not all did in time.
    """
    from everstep_services.cli.operator_requests import CommandRequest
    from everstep_services.cli.output import say

    with invocation.open_api() as api:
        capture = CaptureRequest.new(api, job, asked["ranks"], asked["kinds"])
        details = {
            "capture": capture.id,
            "ranks": asked["ranks"],
            "evidence": capture.kinds,
            "within_s": asked["within_s"],
        }
        say(str(CommandRequest("capture", reason, job, details=details).tell(api)["text"]))
        told = await_pieces(api, capture, asked["within_s"])
        files = fetch(api, capture, told, folder or Path(f"capture-{capture.id[:12]}"))
    return print_pieces(invocation, capture, told, files)


Record = Mapping[str, Any]
Told = Mapping[tuple[str, str], Record]
"""By kind and node, the body of its fact."""

_KIND = "evidence_collected"
_LOOK_EVERY_S = 0.3
_PROJECTED_WITHIN_S = 10.0
_LATER_S = 15.0
"""For the way from the agent to the database."""


@dataclass(frozen=True, slots=True)
class CaptureRequest:
    """A capture, the nodes and kinds that it is of, and the place in the log that it follows."""

    job: str
    id: str
    after: int
    nodes: frozenset[str]
    kinds: tuple[str, ...]

    @classmethod
    def new(cls, api: Api, job: str, ranks: Sequence[int], kinds: Sequence[str]) -> Self:
        """One that nobody has asked for yet; `CliError` where there is nothing to capture."""
        unknown = [kind for kind in kinds if kind not in KINDS]
        if unknown:
            raise CliError(
                f"{unknown[0]!r} is not a kind of evidence: {', '.join(KINDS)}", Exit.USAGE
            )
        here = list(api.pages(f"jobs/{job}/ranks", {}, most=None))
        wanted = [rank_row for rank_row in here if not ranks or rank_row["rank"] in ranks]
        if here and not wanted:
            last = max(rank_row["rank"] for rank_row in here)
            raise CliError(f"job {job} has no such rank: its ranks are 0 to {last}", Exit.USAGE)
        newest: Params = {"job": job, "kind": _KIND, "order": "desc", "limit": 1}
        items = api.get("facts", newest)["items"]
        nodes = frozenset(str(rank_row["node"]) for rank_row in wanted if rank_row["node"])
        if not nodes:
            raise CliError(f"no rank of job {job} runs, as far as its agents tell", Exit.NOT_FOUND)
        after = int(items[0]["n"]) if items else 0
        return cls(job, new_id(), after, nodes, tuple(kinds) or KINDS)

    @property
    def incident(self) -> str:
        """What stands in its facts."""
        return f"{CAPTURE}{self.id}"

    def untold(self, told: Told) -> list[tuple[str, str]]:
        """What no agent has said anything about yet."""
        return sorted({(kind, node) for kind in self.kinds for node in self.nodes} - told.keys())


def await_pieces(
    api: Api, capture: CaptureRequest, within_s: float, sleep: Callable[[float], None] = time.sleep
) -> Told:
    """The answers of the agents, once all have answered or the time is over."""
    told: dict[tuple[str, str], Record] = {}
    after, deadline = capture.after, time.monotonic() + within_s + _LATER_S
    while True:
        asked: Params = {"job": capture.job, "kind": _KIND, "after": after, "limit": 1000}
        for fact in api.pages("facts", asked, most=None):
            after, body = max(after, int(fact["n"])), fact["body"]
            if body["incident"] == capture.incident:
                told.setdefault((body["evidence"], body["node"]), body)
        if (told and not capture.untold(told)) or time.monotonic() >= deadline:
            return told
        sleep(_LOOK_EVERY_S)


def fetch(
    api: Api, capture: CaptureRequest, told: Told, folder: Path
) -> Mapping[tuple[str, str], Path | str]:
    """Where each piece lies now, or why it could not be fetched."""
    files: dict[tuple[str, str], Path | str] = {}
    for (kind, node), body in sorted(told.items()):
        if body.get("blob") is None:
            continue
        try:
            files[kind, node] = _fetch(api, capture, body, folder)
        except (CliError, BadArchiveError) as error:
            files[kind, node] = str(error)
        except OSError as error:
            why = f"{folder} cannot be written: {error.strerror}; name another with --into"
            raise CliError(why) from error
    return files


def _fetch(api: Api, capture: CaptureRequest, body: Record, folder: Path) -> Path:
    kind, node = str(body["evidence"]), str(body["node"])
    if kind not in KINDS or not is_name(node):
        raise CliError(f"{kind!r} of {node!r} has no name for a file")
    data = _content(api, f"incidents/{capture.incident}/evidence/{body['id']}")
    of_kind = folder / kind
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    of_kind.mkdir(exist_ok=True)
    if not archive.is_archive(data):
        path = of_kind / f"{node}.{'txt' if kind == 'kernel_log' else 'json'}"
        path.write_bytes(data)
        return path
    own = of_kind / node
    own.mkdir(exist_ok=True)
    for name, content in archive.files(data):
        (own / name).write_bytes(content)
    return own


def _content(api: Api, path: str) -> bytes:
    """A fact is in the log a moment before it can be asked for by its id."""
    deadline = time.monotonic() + _PROJECTED_WITHIN_S
    while True:
        try:
            return api.content(path)
        except CliError as error:
            if error.code is not Exit.NOT_FOUND or time.monotonic() >= deadline:
                raise
        time.sleep(_LOOK_EVERY_S)


def print_pieces(
    invocation: Invocation,
    capture: CaptureRequest,
    told: Told,
    files: Mapping[tuple[str, str], Path | str],
) -> Exit:
    """Each piece with its file or its reason; the exit code says whether all have answered."""
    untold = capture.untold(told)
    if invocation.output is None or invocation.output == "table":
        rows = [_row(key, body, files.get(key)) for key, body in sorted(told.items())]
        rows += [(cell(kind), cell(node), "", "no answer in time") for kind, node in untold]
        for line in aligned(rows):
            echo(line)
    else:
        pieces = [
            {**body, "file": str(path) if isinstance(path := files.get(key), Path) else None}
            for key, body in sorted(told.items())
        ]
        record = {"capture": capture.id, "job": capture.job, "pieces": pieces, "untold": untold}
        print_record(invocation, "capture", record, "capture")
    return Exit.TIMED_OUT if untold or not told else Exit.OK


def _row(key: tuple[str, str], body: Record, file: Path | str | None) -> tuple[str, str, str, str]:
    where = "none" if file is None else str(file) if isinstance(file, Path) else "not fetched"
    text = body.get("summary") or body.get("missing") or ""
    text = f"{file}; {text}" if isinstance(file, str) else text
    return cell(key[0]), cell(key[1]), cell(where), cell(text)
