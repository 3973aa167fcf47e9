"""Whose line it is, by what launchers and loggers write before it, and by names of files."""

import re
from pathlib import Path
from typing import NamedTuple

import msgspec

_PREFIX = re.compile(
    r"\[(?P<role>[A-Za-z_]\w*?)(?P<member>\d{1,7})\]:\s?"  # torchrun: role and local rank, or rank
    r"|(?P<task>\d{1,6}): "  # srun --label
    r"|(?P<node>[A-Za-z][\w.-]{0,80}):(?P<rank>\d{1,7})\| ?"  # everstep run
    r"|\[(?:[\w.@-]{1,60},)?(?P<mpi>\d{1,7})\]<(?:stdout|stderr)>: ?"  # mpirun, horovod
    r"|\[pod/(?P<pod>[\w.-]{1,120})(?:/[\w.-]{1,80})?\] "  # kubectl logs --prefix
    r"|\((?:[\w.<>]{1,80} )?pid=(?P<pid>\d{1,8})(?:, ip=(?P<ip>[\d.:a-f]{2,45}))?\) ?"  # ray
    r"|(?P<host>[a-z][\w.-]{0,60}?\d[\w.-]{0,60})(?: +\| |: (?=\[|Traceback|  ))"  # compose, pdsh
    r"|\[\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d[.,\d]*\] (?=\[rank)"
    r"|\d{4}-\d\d-\d\d[T ][\d:.,]{8,20}(?:Z|[+-]\d\d:?\d\d)? "
    r"(?:(?:stdout|stderr) [FP] )?(?=[\[\w(│╭╰ ])(?!\w[\w.-]+ [\w/.-]+(?:\[\d+\])?: )"  # containers
)
_NAMED = re.compile(
    r"\[(?:(?:Global )?Rank|RANK|PG [^\]]{1,80} Rank) (\d{1,7})\]|\[rank(\d{1,7})\]:"
    r"|\[rank: (\d{1,7})\]"
)
_NCCL = re.compile(r"^(?P<node>[\w.-]{1,120}):(?P<pid>\d{1,8}):\d{1,8} \[\d{1,3}\] (?=.*NCCL)")
_SYSLOG = re.compile(
    r"^(?:[A-Z][a-z]{2} +\d+ [\d:]{8}|\d{4}-\d\d-\d\dT[\d:.,+Z-]+) (?P<node>[\w.-]+) "
    r"[\w/.-]+(?:\[\d+\])?: ?"
)
_FILE_RANK = re.compile(r"(?:^|[^A-Za-z])rank[-_.]?(\d{1,7})(?:\D|$)")
_FILE_LOCAL = re.compile(r"attempt_\d+/(\d{1,4})/(?:stdout|stderr)\.log$")
_FILE_NODE = re.compile(r"(?:^|[/_.-])((?:node|host|gpu|worker)[-_]?\d{1,6})(?:\D|$)")
_ESCAPES = re.compile(r"\x1b\[[0-?]{0,32}[ -/]{0,8}[@-~]")
_MOST_PREFIXES = 4
OF_SLURM = ("slurmstepd: ", "srun: ")
"""The begin of lines that no rank writes, whatever `srun --label` puts before them."""


class _Whose(NamedTuple):
    rank: int | None
    member: str
    node: str
    pid: str


class _DockerLine(msgspec.Struct):
    log: str


_DOCKER_LINE = msgspec.json.Decoder(_DockerLine)


class Origin(msgspec.Struct, frozen=True, cache_hash=True):
    """Where a line comes from, as far as it tells."""

    file: int
    rank: int | None = None
    member: str = ""
    """The local rank or task, where only that is known: `default3`, `task 3`."""
    node: str = ""
    pid: str = ""

    @property
    def is_of_rank(self) -> bool:
        """Whether a rank wrote the line, although perhaps an unknown one."""
        return self.rank is not None or bool(self.member)

    @property
    def name(self) -> str:
        """The origin in words."""
        return f"rank {self.rank}" if self.rank is not None else self.member

    def within(self, file: "Origin") -> "Origin":
        """The origin of a line that was read as of any file, in this one."""
        return Origin(
            file.file,
            file.rank if self.rank == ANY_FILE.rank else self.rank,
            file.member if self.member == ANY_FILE.member else self.member,
            file.node if self.node == ANY_FILE.node else self.node,
            self.pid,
        )

    def of_process(self, pid: str) -> "Origin":
        """The same, of another process."""
        return msgspec.structs.replace(self, pid=pid)

    @property
    def clock(self) -> str:
        """Whose clock writes the line: a node's, or that of what is known instead."""
        return self.node or self.name or f"file {self.file}"


ANY_FILE = Origin(-1, -1, "\0", "\0")
"""Stands for what the names of files tell of their lines."""


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
    if text.startswith('{"log":"'):
        text = _of_docker(text)
    text = text.removeprefix(" ")  # srun --label pads
    whose = _Whose(file.rank, file.member, file.node, "")
    for _ in range(_MOST_PREFIXES):
        match = _PREFIX.match(text)
        if match is None:
            break
        text = text[match.end() :]
        whose = _by_prefix(whose, match)
    if text.startswith(OF_SLURM):
        whose = whose._replace(rank=None, member="")
    rank, member, node, pid = whose
    if syslog := _SYSLOG.match(text):
        node, text = syslog["node"], text[syslog.end() :]
    elif nccl := _NCCL.match(text):
        node, pid = nccl["node"], nccl["pid"]
    if named := _NAMED.search(text):
        rank = int(named[1] or named[2] or named[3])
    return Origin(file.file, rank, member, node, pid), text


def _by_prefix(whose: _Whose, match: re.Match[str]) -> _Whose:
    """What is known after a prefix."""
    kind = match.lastgroup
    if kind == "member":
        if match["role"].lower() == "rank":
            return whose._replace(rank=int(match["member"]))
        return whose._replace(member=f"{match['role']}{match['member']}")
    if kind in ("rank", "mpi"):
        return whose._replace(rank=int(match[kind]), node=match["node"] or whose.node)
    if kind == "task":
        return whose._replace(member=f"task {match['task']}")
    if match["pid"]:
        node = match["ip"] or whose.node
        return whose._replace(pid=match["pid"], member=f"pid {match['pid']}", node=node)
    return whose._replace(node=match["pod"] or match["host"] or whose.node)


def _of_docker(line: str) -> str:
    """What docker's log of a container holds as JSON."""
    try:
        text = _DOCKER_LINE.decode(line).log
    except (msgspec.DecodeError, msgspec.ValidationError):
        return line
    return _ESCAPES.sub("", text).rstrip("\r\n")


def _last(pattern: re.Pattern[str], text: str) -> str | None:
    matches = pattern.findall(text)
    return str(matches[-1]) if matches else None
