"""Whose line it is, by what launchers and loggers write before it, and by names of files."""

import re
from pathlib import Path

import msgspec

_PREFIX = re.compile(
    r"\[(?P<role>[A-Za-z_]\w*?)(?P<member>\d{1,7})\]:\s?"  # torchrun: role and local rank, or rank
    r"|(?P<task>\d{1,6}): "  # srun --label
    r"|(?P<node>[A-Za-z][\w.-]{0,80}):(?P<rank>\d{1,7})\| ?"  # everstep run
)
_NAMED = re.compile(r"\[(?:Global )?Rank (\d{1,7})\]|\[rank(\d{1,7})\]:")
_SYSLOG = re.compile(
    r"^(?:[A-Z][a-z]{2} +\d+ [\d:]{8}|\d{4}-\d\d-\d\dT[\d:.,+Z-]+) (?P<node>[\w.-]+) "
    r"[\w/.-]+(?:\[\d+\])?: ?"
)
_FILE_RANK = re.compile(r"(?:^|[^A-Za-z])rank[-_.]?(\d{1,7})(?:\D|$)")
_FILE_LOCAL = re.compile(r"attempt_\d+/(\d{1,4})/(?:stdout|stderr)\.log$")
_FILE_NODE = re.compile(r"(?:^|[/_.-])((?:node|host|gpu|worker)[-_]?\d{1,6})(?:\D|$)")
_MOST_PREFIXES = 4


class Origin(msgspec.Struct, frozen=True):
    """Where a line comes from, as far as it tells."""

    file: int
    rank: int | None = None
    member: str = ""
    """The local rank or task, where only that is known: `default3`, `task 3`."""
    node: str = ""

    @property
    def name(self) -> str:
        """The origin in words."""
        return f"rank {self.rank}" if self.rank is not None else self.member


def of_file(number: int, path: Path) -> Origin:
    """What a file's name says of all its lines."""
    text = path.as_posix()
    rank = _last(_FILE_RANK, text)
    local = _FILE_LOCAL.search(text)
    member = f"local rank {local[1]}" if local and rank is None else ""
    node = _last(_FILE_NODE, text) or ""
    return Origin(number, int(rank) if rank is not None else None, member, node)


def of_line(text: str, file: Origin) -> tuple[Origin, str]:
    """Whose line it is, and the line without what stands before it."""
    rank, member, node = file.rank, file.member, file.node
    for _ in range(_MOST_PREFIXES):
        match = _PREFIX.match(text)
        if match is None:
            break
        text = text[match.end() :]
        if match["rank"]:
            rank, node = int(match["rank"]), match["node"]
        elif match["task"]:
            member = f"task {match['task']}"
        elif match["role"].lower() == "rank":
            rank = int(match["member"])
        else:
            member = f"{match['role']}{match['member']}"
    if syslog := _SYSLOG.match(text):
        node, text = syslog["node"], text[syslog.end() :]
    if named := _NAMED.search(text):
        rank = int(named[1] or named[2])
    return Origin(file.file, rank, member, node), text


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    matches = pattern.findall(text)
    return str(matches[-1]) if matches else None
