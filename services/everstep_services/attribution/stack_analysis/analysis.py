"""Which ranks stand elsewhere than the others, from the stacks of all. Pure.

Ranks that wait in a collective wait for ranks outside of it: a rank that does anything else delays
them. If all wait, the ranks that wait elsewhere than most are suspects. One set of stacks cannot
distinguish a hang from a running step: the answer holds for ranks that are known to hang.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from everstep_services.attribution.flight_recorder.ranges import named
from everstep_services.attribution.stack_analysis.report import (
    Pattern,
    StackGroup,
    StackReport,
    StackSuspect,
    Verdict,
    words,
)
from everstep_services.attribution.stack_analysis.rules import (
    ACTIVITIES,
    Activity,
    StackRules,
    ThreadState,
    shipped,
)
from everstep_services.attribution.stack_analysis.stacks import (
    Frame,
    RankStacks,
    Thread,
    Unreadable,
)

_BELIEVED = 0.5
_MOST_STACKS = 10_000
_MOST_NOTES = 64
_MOST_WORLD = 1_000_000
_NEVER_TOLD: frozenset[Activity] = frozenset({"idle", "exit"})
"""Activities of other threads than the main one that are not mentioned."""
_MOVING: frozenset[Activity] = frozenset({"user_code", "compile", "import", "data_read"})
_ONE_SIDED = {"recv": "receive, and none sends", "send": "send, and none receives"}
"""Transfers that need two sides, and the meaning if all ranks are on the same side."""
_ONE_SIDED_CERTAINTY = 0.65
_ROOTED = ("broadcast", "scatter", "gather", "reduce", "send", "recv")
"""Calls that some ranks leave before all have come: the place of most ranks shows little."""
_Key = tuple[str, ThreadState, tuple[Frame, ...]]


@dataclass(slots=True)
class _Fold:
    """The ranks whose threads have one stack."""

    ranks: list[int] = field(default_factory=list)
    holders: list[int] = field(default_factory=list)


class StackAnalysis:
    """Takes the stacks of ranks one by one, and reports what they show together."""

    def __init__(self, *, world: int | None = None, rules: StackRules | None = None) -> None:
        self._rules = rules or shipped()
        self._world = world or 0
        self._states: dict[int, ThreadState] = {}
        self._workers: dict[int, ThreadState] = {}
        self._mains: dict[_Key, _Fold] = {}
        self._others: dict[_Key, _Fold] = {}
        self._notes: list[str] = []
        self._unreadable: dict[int, str] = {}
        self._no_evidence: set[int] = set()

    def add(self, dump: RankStacks | Unreadable) -> None:
        if isinstance(dump, Unreadable):
            self._note(f"{dump.name} was left out: {dump.reason}")
            if dump.rank is not None:
                self._unreadable[dump.rank] = dump.reason
                if not dump.is_evidence:
                    self._no_evidence.add(dump.rank)
            return
        if dump.rank in self._states:
            self._note(f"rank {dump.rank} has a second dump; only the first one is used")
            return
        for problem in dump.problems:
            self._note(f"rank {dump.rank}: {problem}")
        states = [(thread, self._rules.state(thread)) for thread in dump.threads]
        self._states[dump.rank] = self._of_main(states)
        for thread, state in states:
            self._fold(dump.rank, thread, state)
            if thread.child and "data_worker" in (state.activity, state.within):
                self._workers.setdefault(dump.rank, state)

    def _of_main(self, states: Sequence[tuple[Thread, ThreadState]]) -> ThreadState:
        """The state of the main thread, which may wait for the lock that another thread holds."""
        state = next((state for thread, state in states if thread.is_main), ThreadState("unknown"))
        holder = next(
            (
                (thread, other)
                for thread, other in states
                if thread.has_interpreter and not thread.is_main and not thread.child
            ),
            None,
        )
        if holder is None:
            return state
        thread, other = holder
        is_open = state.activity in ("user_code", "standing", "unknown")
        if not is_open and not (state.activity == "lock" and thread.is_idle):
            return state
        return ThreadState(
            "interpreter_lock", f"{thread.name}: {other.place or other.call}", None, state.place
        )

    def _fold(self, rank: int, thread: Thread, state: ThreadState) -> None:
        folds = self._mains if thread.is_main else self._others
        if not thread.is_main and state.activity in _NEVER_TOLD:
            return
        state = self._states[rank] if thread.is_main else state
        key = (thread.name, state, thread.frames)
        if key not in folds and len(folds) >= _MOST_STACKS:
            self._note(f"more than {_MOST_STACKS} different stacks: the rest is not shown")
            return
        fold = folds.setdefault(key, _Fold())
        fold.ranks.append(rank)
        if thread.has_interpreter:
            fold.holders.append(rank)

    def _note(self, text: str) -> None:
        if len(self._notes) < _MOST_NOTES and text not in self._notes:
            self._notes.append(text)

    def report(self) -> StackReport:
        """Return the report about all stacks so far."""
        ranks = [*self._states, *self._unreadable]
        world = min(max([self._world, *(rank + 1 for rank in ranks)], default=0), _MOST_WORLD)
        missing = tuple(rank for rank in range(world) if rank not in self._states)
        answer = _Judgement(
            self._states, self._workers, missing, self._unreadable, self._no_evidence
        ).answer()
        return StackReport(
            verdict=answer.verdict,
            pattern=answer.pattern,
            summary=answer.summary,
            confidence=round(answer.confidence, 2),
            ranks=len(self._states),
            suspects=answer.suspects,
            waiting=answer.waiting,
            groups=tuple(_groups(self._mains)),
            others=tuple(_groups(self._others)),
            missing=missing,
            notes=tuple(self._notes),
        )


def _groups(folds: Mapping[_Key, _Fold]) -> Iterator[StackGroup]:
    for (name, state, frames), fold in sorted(
        folds.items(), key=lambda item: (-len(item[1].ranks), min(item[1].ranks))
    ):
        yield StackGroup(
            ranks=tuple(sorted(set(fold.ranks))),
            thread=name,
            state=state,
            frames=tuple(frame.place for frame in frames),
            has_interpreter=tuple(sorted(set(fold.holders))),
        )


@dataclass(frozen=True, slots=True)
class _Answer:
    pattern: Pattern
    summary: str
    confidence: float = 0.0
    suspects: tuple[StackSuspect, ...] = ()
    waiting: tuple[int, ...] = ()
    is_calm: bool = False
    """Whether no rank waits for another."""

    @property
    def verdict(self) -> Verdict:
        if self.is_calm:
            return "nothing"
        return "odd_ranks" if self.suspects and self.confidence >= _BELIEVED else "inconclusive"


class _Judgement:
    """Compares what the ranks do."""

    def __init__(
        self,
        states: Mapping[int, ThreadState],
        workers: Mapping[int, ThreadState],
        missing: Sequence[int],
        unreadable: Mapping[int, str],
        no_evidence: Collection[int],
    ) -> None:
        self._states = states
        self._workers = workers
        self._missing = missing
        self._unreadable = unreadable
        self._no_evidence = no_evidence
        self._waiting = sorted(
            rank for rank, state in states.items() if ACTIVITIES[state.activity].awaits_others
        )
        self._busy = sorted(set(states) - set(self._waiting))

    def answer(self) -> _Answer:
        if not self._states:
            return _Answer("scattered", "inconclusive: there is no stack")
        self._count_devices()
        if self._waiting and self._busy:
            return self._of_busy()
        if self._waiting:
            return self._of_missing() if self._missing else self._of_waiting()
        return self._without_wait()

    def _count_devices(self) -> None:
        """Where most wait for their devices, these wait for the few ranks that stand elsewhere."""
        devices = [rank for rank in self._busy if self._states[rank].activity == "device"]
        rest = [rank for rank in self._busy if rank not in devices]
        is_still = not {self._states[rank].activity for rank in rest} & _MOVING
        if not self._waiting and is_still and len(devices) >= 2 * len(rest) > 0:
            self._waiting, self._busy = devices, rest

    def _of_busy(self) -> _Answer:
        """Answer if some ranks wait: the ranks that do anything else are awaited."""
        suspects = sorted(map(self._suspect, self._busy), key=lambda suspect: -suspect.certainty)
        confidence = suspects[0].certainty
        if len(self._busy) > len(self._waiting):
            confidence *= 0.5
        where = self._meeting()
        at = _at(self._states[self._busy[0]]) if len(self._busy) == 1 else ""
        summary = (
            f"{named(self._busy)} {self._does(self._busy)}{at}, and "
            f"{named(self._waiting)} wait{'s' * (len(self._waiting) == 1)} {where}"
        )
        if confidence < _BELIEVED:
            summary = f"inconclusive: {summary}"
        return _Answer("odd", summary, confidence, tuple(suspects), tuple(self._waiting))

    def _meeting(self) -> str:
        states = {self._states[rank] for rank in self._waiting}
        if len(states) == 1:
            state = states.pop()
            call = f" in {state.call}" if state.call else ""
            return f"for others{call}, at {state.place}" if state.place else f"for others{call}"
        return f"for others, at {len(states)} places"

    def _does(self, ranks: Sequence[int]) -> str:
        states = {self._states[rank].activity for rank in ranks}
        if len(states) > 1:
            return "do other things"
        text = ACTIVITIES[states.pop()].words
        return text if len(ranks) == 1 else f"each {text}"

    def _suspect(self, rank: int) -> StackSuspect:
        state = self._states[rank]
        meaning = ACTIVITIES[state.activity]
        place = f" at {state.place}" if state.place else ""
        reason = f"{words(state)}{place}"
        if state.activity == "data_wait" and rank in self._workers:
            worker = self._workers[rank]
            reason += f"; its worker is at {worker.place or worker.call}"
        domain = meaning.domain
        if state.within is not None and domain in ("user_code", "unknown"):
            domain = ACTIVITIES[state.within].domain
        return StackSuspect(
            rank=rank,
            reason=reason,
            activity=state.activity,
            domain=domain,
            certainty=meaning.certainty,
        )

    def _of_missing(self) -> _Answer:
        """The answer if all ranks with a stack wait."""
        few = len(self._missing) <= len(self._waiting)
        absent = [rank for rank in self._missing if rank not in self._no_evidence]
        if not absent:
            summary = f"inconclusive: the stacks of {named(self._missing)} cannot be read"
            return _Answer("scattered", summary, waiting=tuple(self._waiting))
        suspects = tuple(
            StackSuspect(
                rank=rank,
                reason=self._unreadable.get(rank, "there is no stack of it: has it died?"),
                activity="unknown",
                domain="unknown",
                certainty=0.6,
            )
            for rank in absent
        )
        summary = (
            f"{named(absent)} left no stack, and all {len(self._waiting)} others wait "
            f"{self._meeting()}"
        )
        if not few:
            summary = f"inconclusive: {summary}"
        return _Answer("odd", summary, 0.6 if few else 0.3, suspects, tuple(self._waiting))

    def _of_waiting(self) -> _Answer:
        """The answer if all ranks wait: the odd ones wait elsewhere than most."""
        parts = self._parts(self._waiting)
        waiting = tuple(self._waiting)
        one_sided = self._one_sided(waiting)
        if one_sided is not None:
            return one_sided
        if len(parts) == 1:
            (state,) = parts
            return _Answer("together", self._all_in(state), waiting=waiting)
        transfers = [rank for rank in waiting if self._states[rank].activity == "point_to_point"]
        if transfers and len(transfers) < len(waiting):
            return self._odd(transfers, waiting, 0.6)
        largest = max(parts.values(), key=len)
        odd = [rank for rank in waiting if rank not in largest]
        if len(largest) > len(odd):
            is_rooted = any(state.call.startswith(_ROOTED) for state in parts)
            return self._odd(odd, waiting, 0.4 if is_rooted else 0.7 if len(parts) == 2 else 0.5)
        shown = "; ".join(
            f"{named(ranks)} {words(state)}{_at(state)}" for state, ranks in list(parts.items())[:4]
        )
        return _Answer(
            "split" if len(parts) <= max(2, len(waiting) // 2) else "scattered",
            f"inconclusive: the ranks wait for each other in {len(parts)} parts: {shown}",
            0.4,
            tuple(map(self._waits_elsewhere, waiting)),
            waiting,
        )

    def _one_sided(self, waiting: tuple[int, ...]) -> _Answer | None:
        """The answer where all ranks wait for a transfer that no rank begins."""
        if len(waiting) < 2:
            return None
        calls = {self._states[rank].call for rank in waiting}
        for side, meaning in _ONE_SIDED.items():
            if all(call.startswith(side) for call in calls):
                places: dict[str, list[int]] = {}
                for rank in waiting:
                    places.setdefault(_at(self._states[rank]), []).append(rank)
                told = ", ".join(f"{named(ranks)}{at}" for at, ranks in places.items())
                where = f": {told}" if len(places) > 1 else next(iter(places))
                return _Answer(
                    "together",
                    f"all {len(waiting)} ranks wait to {meaning}{where}",
                    _ONE_SIDED_CERTAINTY,
                    tuple(map(self._waits_elsewhere, waiting)),
                    waiting,
                )
        return None

    def _all_in(self, state: ThreadState) -> str:
        is_alone = len(self._waiting) == 1
        who = named(self._waiting) if is_alone else f"all {len(self._waiting)} ranks with a stack"
        call = f" in {state.call}" if state.call else ""
        where = "" if is_alone else " at the same place"
        return (
            f"inconclusive: {who} wait{'s' * is_alone}{call}{where}{_at(state)}: the network, a "
            "device, groups in another order, or a rank without a stack"
        )

    def _odd(self, odd: Sequence[int], waiting: tuple[int, ...], confidence: float) -> _Answer:
        rest = [rank for rank in waiting if rank not in odd]
        state, other = self._states[odd[0]], self._states[rest[0]]
        summary = (
            f"{named(odd)} {'wait' if len(odd) > 1 else 'waits'} elsewhere than the others: in "
            f"{state.call or state.activity}{_at(state)}, where {named(rest)} "
            f"{'wait' if len(rest) > 1 else 'waits'} in {other.call or other.activity}{_at(other)}"
        )
        if confidence < _BELIEVED:
            summary = f"inconclusive: {summary}"
        return _Answer("odd", summary, confidence, tuple(map(self._waits_elsewhere, odd)), waiting)

    def _waits_elsewhere(self, rank: int) -> StackSuspect:
        state = self._states[rank]
        return StackSuspect(
            rank=rank,
            reason=f"{words(state)}{_at(state)}",
            activity=state.activity,
            domain="user_code",
            certainty=0.6,
        )

    def _without_wait(self) -> _Answer:
        """The answer if no rank waits in a collective."""
        parts = self._parts(self._busy)
        activities = {state.activity for state in parts}
        if activities <= _MOVING:
            return _Answer(
                "scattered", "no rank waits for others; all of them are at work", is_calm=True
            )
        if len(activities) == 1:
            (activity,) = activities
            who = f"each of {named(self._busy)}" if len(self._busy) > 1 else named(self._busy)
            return _Answer(
                "together",
                f"inconclusive: {who} {ACTIVITIES[activity].words}",
                suspects=tuple(map(self._suspect, self._busy)),
                confidence=0.4,
            )
        still = [rank for rank in self._busy if self._states[rank].activity not in _MOVING]
        largest = max(parts.values(), key=len)
        odd = [rank for rank in self._busy if rank not in largest]
        if len(largest) >= 2 * len(odd):
            still = odd
        return _Answer(
            "odd" if still else "scattered",
            f"inconclusive: no rank waits for others; {named(still)} {self._does(still)}",
            0.4,
            tuple(map(self._suspect, still)),
        )

    def _parts(self, ranks: Sequence[int]) -> dict[ThreadState, list[int]]:
        parts: dict[ThreadState, list[int]] = {}
        for rank in ranks:
            parts.setdefault(self._states[rank], []).append(rank)
        return dict(sorted(parts.items(), key=lambda item: (-len(item[1]), item[1][0])))


def _at(state: ThreadState) -> str:
    return f" at {state.place}" if state.place else ""
