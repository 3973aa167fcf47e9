"""Compares what was reported of a training with what is true of it, and counts."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from tests.chaos.numerics_runs.drawing import Case
from trainer_sdk.numerics.judgement import ROUNDING

RankResult = dict[str, Any]
_LEAST = 0.99
_MISSED, _MISJUDGED, _MISNAMED = "not detected", "judged", "named"
_COUNTED = (_MISSED, _MISJUDGED, _MISNAMED)
"""Faults of reports that may happen to a hundredth of the trainings; no others may."""
_TWO_REPLICAS = 4
"""The world in which a pipeline has two replicas."""
_KINDS = {
    "flip_parameter": {"persistent", "replica_differs"},
    "flip_reduced_gradient": {"replica_differs"},
    "poison_batch": {"correct_but_unexpected"},
}
"""Of other faults: `persistent` if they come again, else `transient`."""


@dataclass
class Row:
    """A training, and what was right about its reports."""

    case: Case
    is_effective: bool = True
    """Whether the fault has changed any result by more than rounding, in a step that is looked
    at."""
    is_detected: bool = False
    is_kind_right: bool = False
    is_rank_right: bool | None = None
    """None if no rank is named, or if it is undecided."""
    is_undecided: bool = False
    """Whether the faulty rank is named with another one, as nothing tells them apart."""
    is_same: bool | None = None
    """Whether the training went on bit for bit as the undisturbed one; None if it must not."""
    rank_steps: int = 0
    again: int = 0
    rollbacks: int = 0
    faults: list[str] = field(default_factory=list)
    """What is wrong with the reports or with the training."""

    def __str__(self) -> str:
        case, fault = self.case, self.case.fault
        what = "healthy" if fault is None else fault.name
        often = "" if fault is None else ", each time" if fault.is_persistent else ", once"
        text = "; ".join(self.faults) or ("right" if self.is_effective else "without effect")
        return (
            f"seed {case.seed}: {case.parallel} x {case.world}, {case.plan}, {what}{often}: {text}"
        )


def judged(case: Case, results: Sequence[RankResult]) -> Row:
    """The row of a case, from what its ranks have written."""
    events = results[0]["events"]
    row = Row(case)
    row.rank_steps = case.world * len(results[0]["losses"])
    row.again = sum(e["event"] == "judged" for e in events)
    row.rollbacks = sum(
        e["event"] == "acted" and e["action"] in ("rollback", "skip") and e["outcome"] == "done"
        for e in events
    )
    if case.plan == "counted":
        _counted(row, events, results)
    elif case.fault is None:
        _healthy(row, events)
    else:
        _faulty(row, events, results)
    _continued(row, results)
    return row


def _counted(row: Row, events: list[dict[str, Any]], results: Sequence[RankResult]) -> None:
    """Each step is run again once: only a fault that has passed makes a result differ."""
    case, counts = row.case, [event for event in events if event["event"] == "counted"]
    row.faults += [f"{e['event']} in step {e['step']}" for e in events if e["event"] == "acted"]
    # A training that is NaN from there on is not run again for ever.
    least = case.steps if case.fault is None else case.fault.step
    if not counts or counts[-1]["again"] < least:
        row.faults.append(f"not each of the first {least} steps was run again: {counts[-1:]}")
        return
    compared = counts[-1]["results"]
    different = {each["name"]: each["different"] for each in compared if each["different"]}
    if case.fault is None:
        row.faults += [f"false alarm: {different} differ"] if different else []
        return
    row.is_detected = row.is_kind_right = bool(different)
    row.is_effective = bool(different) or _has_effect(case, results)
    if row.is_effective and not different:
        row.faults.append(f"{_MISSED} in {[each['name'] for each in compared]}")


def _healthy(row: Row, events: Iterable[dict[str, Any]]) -> None:
    for event in events:
        is_wrong = event["event"] == "judged" and event["kind"] != "correct_but_unexpected"
        if is_wrong:
            row.faults.append(f"false alarm: {event['kind']} in step {event['step']}")
    if row.rollbacks:
        row.faults.append(f"{row.rollbacks} false roll-backs")


def _faulty(row: Row, events: Iterable[dict[str, Any]], results: Sequence[RankResult]) -> None:
    case, fault = row.case, row.case.fault
    assert fault is not None
    reported = [e for e in events if e["event"] == "judged"]
    early = [
        e for e in reported if e["step"] < fault.step and e["kind"] != "correct_but_unexpected"
    ]
    row.faults += [f"false alarm: {e['kind']} in step {e['step']}" for e in early]
    due = [e for e in reported if fault.step <= e["step"] <= _latest(case)]
    row.is_detected = bool(due)
    if not due:
        row.is_effective = _has_effect(case, results)
        if row.is_effective:
            others = [f"{e['kind']} in step {e['step']}" for e in reported]
            row.faults.append(f"{_MISSED} by step {_latest(case)} ({', '.join(others)})")
        return
    first = due[0]
    expected = _KINDS.get(fault.name) or {"persistent" if fault.is_persistent else "transient"}
    row.is_kind_right = first["kind"] in expected
    if not row.is_kind_right:
        kinds = " or ".join(sorted(expected))
        row.faults.append(f"{_MISJUDGED} {first['kind']}, not {kinds}: {first['reason']}")
    named = set(first.get("ranks", ()))
    row.is_undecided = len(named) > 1 and fault.rank in named <= _possible(case)
    row.is_rank_right = None if not named or row.is_undecided else named == {fault.rank}
    if fault.name == "poison_batch":
        return
    if row.is_rank_right is False:
        row.faults.append(f"{_MISNAMED} {sorted(named)}, not {fault.rank}: {first['reason']}")
    elif not named and first["kind"] not in ("transient", "correct_but_unexpected"):
        row.is_rank_right = False
        row.faults.append(f"{_MISNAMED} nobody: {first['reason']}")


def _latest(case: Case) -> int:
    """The last step in which the fault must be reported."""
    assert case.fault is not None
    every = case.choices.get("hash_every") or case.choices.get("validate_every") or 1
    at = -(-case.fault.step // every) * every
    # Hashes are compared in the background.
    return case.steps if case.plan == "replicas" else at


def _possible(case: Case) -> set[int]:
    """The faulty rank, and those that nothing may tell from it.

    These are the other of two replicas, and stages of a pipeline if the first computation was not
    recorded, or if devices round differently.
    """
    fault = case.fault
    assert fault is not None
    rank = fault.rank
    if case.parallel == "pipeline":
        same = {rank // 2 * 2, rank // 2 * 2 + 1}
        is_of_two = case.world == _TWO_REPLICAS and fault.is_persistent
        if case.plan != "spike" and case.is_exact:
            return {rank, (rank + 2) % _TWO_REPLICAS} if is_of_two else {rank}
        return set(range(case.world)) if is_of_two else same
    if not case.is_exact and fault.is_persistent:
        return set(range(case.world))
    if case.parallel == "hsdp" and case.plan == "replicas":
        return {rank, (rank + case.world // 2) % case.world}
    return {rank}


def _has_effect(case: Case, results: Sequence[RankResult]) -> bool:
    """Whether a fault that nobody has reported has changed a result by more than rounding."""
    assert case.fault is not None
    if case.plan == "replicas":
        return any(r["parameters"] != r["undisturbed"]["parameters"] for r in results)
    first = (
        range(case.fault.step, _latest(case) + 1) if case.fault.is_persistent else [case.fault.step]
    )
    least = 0.0 if case.is_exact else ROUNDING
    return any(
        _apart(r[name].get(str(step)), r["undisturbed"][name].get(str(step)), usual) > least
        for name in ("losses", "norms")
        for step in first
        for usual in [_usual(results, name, step)]
        for r in results
    )


def _usual(results: Sequence[RankResult], name: str, step: int) -> float:
    """How large losses or norms are: one that happens to be small is rounded like the others."""
    values = [r["undisturbed"][name].get(str(step)) for r in results]
    sizes = [abs(value) for value in values if value is not None and math.isfinite(value)]
    return median(sizes) if sizes else 0.0


def _apart(first: float | None, second: float | None, usual: float) -> float:
    if first is None or second is None or first == second:
        return 0.0
    if not (math.isfinite(first) and math.isfinite(second)):
        return 0.0 if math.isnan(first) and math.isnan(second) else math.inf
    return abs(first - second) / max(abs(first), abs(second), usual)


def _continued(row: Row, results: Sequence[RankResult]) -> None:
    """Check that the training is as one that was never disturbed."""
    case = row.case
    if case.fault is None or case.plan in ("validated", "spike"):
        is_mended = case.fault is None or (row.is_detected and not case.fault.is_persistent)
    else:
        is_mended = row.rollbacks > 0
    if case.saves_every and row.is_detected and not is_mended:
        row.faults.append("the training has not gone back")
    if not is_mended:
        return
    row.is_same = all(
        repr(r[name]) == repr(r["undisturbed"][name])
        for r in results
        for name in ("losses", "parameters")
    )
    if not row.is_same:
        row.faults.append(f"{_first_difference(results)} is not that of an undisturbed training")


def _first_difference(results: Sequence[RankResult]) -> str:
    for rank, result in enumerate(results):
        for step, loss in result["losses"].items():
            other = result["undisturbed"]["losses"].get(step)
            if repr(loss) != repr(other):
                return f"the loss {loss} of step {step} on rank {rank} ({other})"
    return "a parameter"


def table(rows: Sequence[Row]) -> str:
    """The figures, as a table of Markdown."""
    effective = [row for row in rows if row.case.fault is not None and row.is_effective]
    lines = [
        "| plan | runs | no effect | found | kind right | rank right | undecided | undisturbed |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    plans = Counter(row.case.plan for row in rows)
    for plan, runs in sorted(plans.items()):
        here = [row for row in rows if row.case.plan == plan]
        faulty = [row for row in effective if row.case.plan == plan]
        found = [row for row in faulty if row.is_detected]
        named = [row for row in found if row.is_rank_right is not None]
        same = [row for row in here if row.is_same is not None]
        lines.append(
            f"| {plan} | {runs} | {sum(not row.is_effective for row in here)} "
            f"| {len(found)}/{len(faulty)} "
            f"| {sum(row.is_kind_right for row in found)}/{len(found)} "
            f"| {sum(bool(row.is_rank_right) for row in named)}/{len(named)} "
            f"| {sum(row.is_undecided for row in found)} "
            f"| {sum(bool(row.is_same) for row in same)}/{len(same)} |"
        )
    healthy = [row for row in rows if row.case.fault is None]
    alarms = sum(text.startswith("false") for row in healthy for text in row.faults)
    rank_steps = sum(row.rank_steps for row in healthy)
    lines.append(f"\nfalse alarms: {alarms} in {rank_steps} healthy rank-steps")
    return "\n".join(lines)


def shortfalls(rows: Sequence[Row]) -> list[str]:
    """What is below what users are promised."""
    effective = [row for row in rows if row.case.fault is not None and row.is_effective]
    detected = [row for row in effective if row.is_detected]
    # Who spread a poisoned batch does not matter: the batch is named.
    named = [row for row in detected if row.is_rank_right is not None]
    named = [row for row in named if row.case.plan != "poison"]
    shares = {
        "found": (len(detected), len(effective)),
        "kind right": (sum(row.is_kind_right for row in detected), len(detected)),
        "rank right": (sum(bool(row.is_rank_right) for row in named), len(named)),
    }
    short = [
        f"{name}: {part} of {whole}" for name, (part, whole) in shares.items()
        if part < _LEAST * whole
    ]  # fmt: skip
    wrong = [
        str(row) for row in rows
        if row.is_same is False or any(not text.startswith(_COUNTED) for text in row.faults)
    ]  # fmt: skip
    return short + wrong
