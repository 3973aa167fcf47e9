"""Which cases of a job stay: all that wait for a verdict, and the newest that have one. Pure."""

from collections.abc import Iterator, Sequence
from typing import Final

from msgspec.structs import replace

from everstep.messages import Case

JUDGED_MOST: Final = 8
"""Of a job: older ones with a verdict are no longer amended."""
UNJUDGED_MOST: Final = 1024
"""Of a job: a queue, in which only a flood of forged incidents is longer."""
_WHOLE_MOST = 64
"""Of the cases without a verdict: older ones keep only the first parts of each kind."""
_FIRST_PARTS = 8


def kept(cases: Sequence[Case]) -> Iterator[Case]:
    """The cases that stay before another one: all without a verdict, and the newest others."""
    judged = sum(case.verdict is not None for case in cases)
    waiting = len(cases) - judged
    for case in cases:
        if case.verdict is not None:
            judged -= 1
            if judged < JUDGED_MOST - 1:
                yield case
        else:
            waiting -= 1
            if waiting < UNJUDGED_MOST - 1:
                yield case if waiting < _WHOLE_MOST else _brief(case)


def _brief(case: Case) -> Case:
    """The case with the first parts of each kind, which tell the most."""
    parts = (case.ends, case.done, case.stalls, case.warned_stalls, case.evidence, case.saves)
    if max(map(len, parts)) <= _FIRST_PARTS:
        return case
    return replace(
        case,
        ends=case.ends[:_FIRST_PARTS],
        more_ends=case.more_ends + len(case.ends[_FIRST_PARTS:]),
        done=case.done[:_FIRST_PARTS],
        more_done=case.more_done + len(case.done[_FIRST_PARTS:]),
        stalls=case.stalls[:_FIRST_PARTS],
        warned_stalls=case.warned_stalls[:_FIRST_PARTS],
        evidence=case.evidence[:_FIRST_PARTS],
        saves=case.saves[:_FIRST_PARTS],
    )


def shortened(cases: tuple[Case, ...]) -> tuple[Case, ...]:
    """The cases without the oldest that has a verdict; else all of them brief; else without one.

    They stay as they are if there is only one, and it is brief.
    """
    judged = next((case for case in cases[:-1] if case.verdict is not None), None)
    if judged is not None:
        return tuple(case for case in cases if case is not judged)
    brief = tuple(map(_brief, cases))
    return brief if brief != cases else cases[1:] or cases
