"""How the figures are shown: each contender next to the limit, and by how much it is slower."""

import statistics
from collections.abc import Mapping, Sequence

from benchmarks.restarts.ledger import PHASES
from benchmarks.rig import HEAD, row

US = "everstep warm"


def show(figures: Mapping[str, Sequence[float]], notes: Mapping[str, str], us: str = US) -> None:
    """Milliseconds of each contender; its notes, and how many times ours its median is."""
    print(HEAD)
    ours = statistics.median(figures[us]) if figures.get(us) else None
    for name, values in figures.items():
        note = notes.get(name, "")
        if not values:
            print(f"  {name:42}{note:>36}")
            continue
        ratio = "" if ours is None else f"x{statistics.median(values) / ours:.2f}"
        print(row(f"  {name}", values, f"ms  {ratio:8}{note}"))


def show_phases(name: str, ledgers: Sequence[Mapping[str, float]]) -> None:
    """Where the time went, by its own account: the median of each phase."""
    if not ledgers:
        return
    spent = {phase: statistics.median(one[phase] for one in ledgers) for phase in PHASES}
    shown = ", ".join(f"{phase} {took:.0f}" for phase, took in spent.items() if took >= 0.5)
    total = statistics.median(sum(one.values()) for one in ledgers)
    print(f"  {name}, its own ledger (n={len(ledgers)}, medians, ms): {shown}; in all {total:.0f}")
