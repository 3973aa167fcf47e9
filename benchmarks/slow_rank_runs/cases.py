"""What can be slow, and the training in which it is."""

from dataclasses import dataclass
from typing import Literal, get_args

from benchmarks.slow_rank_runs.train import Shape

Kind = Literal["input", "compute", "nice", "host", "link", "delay"]
Place = Literal["plain", "one host", "hosts", "network"]
LOSES_S = {"input": 0.15, "compute": 0.2}


@dataclass(frozen=True, slots=True)
class Case:
    """One kind of slowness, and where the training runs so that there can be such."""

    kind: Kind
    cause: str
    nodes: int
    place: Place
    shape: Shape
    is_light: bool
    """It computes so little that another training may run in parallel."""


CASES = {
    one.kind: one
    for one in (
        Case("input", "input", 2, "plain", Shape(), is_light=True),
        Case("compute", "compute", 2, "plain", Shape(), is_light=True),
        Case("nice", "host", 2, "one host", Shape(repeats=8), is_light=False),
        Case("host", "host", 4, "hosts", Shape(repeats=4), is_light=False),
        Case("link", "network", 4, "network", Shape(width=512), is_light=False),
        Case("delay", "network", 4, "network", Shape(width=512), is_light=False),
    )
}
assert CASES.keys() == set(get_args(Kind))
PLAIN = "plain-"
"""Before a kind: the script knows nothing of Everstep, and no cause is asked for."""


def case_of(name: str) -> Case:
    kind = name.removeprefix(PLAIN)
    for known, case in CASES.items():
        if known == kind:
            return case
    raise SystemExit(f"no kind {name}: {', '.join(CASES)}, or {PLAIN} before one of these")
