"""Ranks that outlive rounds: faults at random moments, and a control plane that forms rounds."""

import random
from collections import Counter

from tests.sim.survivor_processes import LAYOUTS, Group, Process, Reference, State
from trainer_sdk.survive.agreement import HealPlan, RankHolding

_MOST_TICKS = 40_000
_LOST_ORDERS = 0.2


class Trial:
    """A schedule: a layout, faults at random moments, and a control plane that forms rounds."""

    def __init__(self, seed: int, layout: str = "", faults: int | None = None) -> None:
        self.random = random.Random(seed)
        name = layout or self.random.choice(list(LAYOUTS))
        self.layout = LAYOUTS[name]
        self.reference = Reference(self.layout.places)
        self.size = len(self.layout.places)
        self.faults = self.random.randrange(7) if faults is None else faults
        self._kinds = ["kill", "two", "hang", "cut", "request", self.random.choice(["kill", "cut"])]
        self.images: dict[tuple[int, int], dict[int, State]] = {}
        """By round and step, those that each rank has saved."""
        self.reached = dict.fromkeys(range(self.size), 0)
        self.outcomes: Counter[str] = Counter()
        self.lost: list[int] = []
        """The steps that each agreement has lost, of those that all ranks had made."""
        self._is_copy_spoiled, self._is_slow_to_park = (
            self.faults > 1 and self.random.random() < 0.3 for _ in range(2)
        )
        self._stale: list[Process] = []
        self._is_ending = False
        self._is_requested = False
        self._begin_round([self._new(number) for number in range(self.size)], 1)

    def run(self) -> "Trial":
        """Until all ranks have made all steps; `AssertionError` if an invariant is broken."""
        faults_at = {self.random.randrange(10, 150 * self.size) for _ in range(self.faults)}
        for tick in range(_MOST_TICKS):
            if tick in faults_at:
                self._fail()
            turn = self.random.randrange(self.size + 1)
            if turn == self.size:
                self._control()
            else:
                self._advance(self.group.members[turn])
            if self._stale:
                self._advance(self.random.choice(self._stale))
            if all(each.is_done for each in self.group.members):
                for process in self.group.members:
                    self.check_state(process)
                return self
        raise AssertionError("the training does not end")

    def _advance(self, process: Process) -> None:
        if process.is_alive:
            process.advance()

    def check_plan(
        self, group: Group, attempt: int, plan: HealPlan, holdings: list[RankHolding]
    ) -> None:
        """All ranks of a group come to the same plan, and it loses as little as it can."""
        if attempt in group.plans:
            assert group.plans[attempt] == plan, "ranks of a group have other plans"
            return
        group.plans[attempt] = plan
        step = plan.step or 0
        kind = "live" if plan.is_live else "fresh" if plan.step is None else "image"
        if all(holding.step is None for holding in holdings):
            kind = "first"
        self.outcomes[kind] += 1
        lost = max(min(self.reached.values()) - step, 0)
        self.lost.append(lost)
        marks = [each.mark for each in holdings if each.mark is not None]
        newest = max((each.whole for each in holdings if each.whole is not None), default=None)
        has_failed = any(holding.avoids for holding in holdings)
        if len(set(self.layout.places)) == 1 and marks and newest == max(marks) and not has_failed:
            assert (plan.made_in, step) == newest, "a replica was newer"

    def check_state(self, process: Process) -> None:
        """A rank trains on what an undisturbed training has."""
        assert not process.is_torn, "a torn state is trained on"
        assert process.step is not None
        right = self.reference.values[process.step][process.number]
        assert process.state is not None
        assert process.state.value == right, (
            f"rank {process.number} has a wrong step {process.step}"
        )

    def spoils_copy(self) -> bool:
        """Whether the bytes of a copy arrive wrong."""
        return self._is_copy_spoiled and self.random.random() < 0.3

    def image_steps(self) -> tuple[int, ...]:
        """The steps whose images all ranks have saved."""
        whole = {step for (_, step), saved in self.images.items() if len(saved) == self.size}
        return tuple(whole)

    def image_of(self, number: int, step: int) -> State:
        """The newest image of this step that all ranks have saved."""
        of_step = [each for each in self.images if each[1] == step]
        whole = [each for each in of_step if len(self.images[each]) == self.size]
        return self.images[max(whole)][number]

    def save(self, process: Process) -> None:
        """Save an image of this rank; with those of all others it can be restored."""
        assert process.step is not None
        assert process.state is not None
        images = self.images.setdefault((process.round, process.step), {})
        images[process.number] = process.state

    def _new(self, number: int) -> Process:
        return Process(self, number, self.layout.nodes[number], self.layout.places[number])

    def _begin_round(self, members: list[Process], round_: int) -> None:
        self.group = Group(self, round_, members)
        self._is_ending = self._is_requested = False
        for process in members:
            process.orders.append(("go_on", round_, self.group))

    def _fail(self) -> None:
        """A fault at a random rank, or at its node."""
        victim = self.random.choice(self.group.members)
        kind = self.random.choice(self._kinds)
        self.outcomes[f"fault: {kind}"] += 1
        if kind == "hang":
            victim.is_hung = True
        elif kind == "cut":
            for process in self.group.members:
                process.is_cut = process.is_cut or process.node == victim.node
        elif kind == "request":
            self._is_requested = True
        else:
            victims = self.random.sample(self.group.members, 2 if kind == "two" else 1)
            for process in victims:
                process.is_alive = False

    def _control(self) -> None:
        """End a round that cannot go on, park its survivors, and form the next."""
        group = self.group
        if not self._is_ending:
            self._is_ending = self._is_requested or any(map(self._is_lost, group.members))
            if not self._is_ending:
                self._repeat([each for each in group.members if each.round != group.round])
            return
        waited_for = []
        for process in group.members:
            is_late = not self._is_parked(process) and self._ends_in_time()
            if (process.is_hung and not process.is_cut) or is_late:
                process.is_alive = False
            elif not (self._is_gone(process) or self._is_parked(process)):
                waited_for.append(process)
        self._park(waited_for)
        if not waited_for:
            self._begin_round(
                [self._member(number) for number in range(self.size)], group.round + 1
            )

    def _is_lost(self, process: Process) -> bool:
        if process.is_hung or process.is_cut:
            return self.random.random() < 0.2  # a limit has passed
        return not process.is_alive or (process.has_left and process.round == self.group.round)

    def _is_gone(self, process: Process) -> bool:
        return process.is_cut or process.is_done or not process.is_alive

    def _is_parked(self, process: Process) -> bool:
        """Whether it has left this round, or has never got the order to begin it."""
        is_still_parked = process.has_left and process.round < self.group.round
        return is_still_parked or process.parked_in == self.group.round

    def _ends_in_time(self) -> bool:
        """Whether a rank has not parked within the limit, and is killed."""
        return self._is_slow_to_park and self.random.random() < 0.02

    def _park(self, processes: list[Process]) -> None:
        for process in processes:
            self._send(process, ("park", self.group.round, None))

    def _repeat(self, processes: list[Process]) -> None:
        """Orders that were lost are sent again; now and then an old order arrives late."""
        for process in processes:
            self._send(process, ("go_on", self.group.round, self.group))
        if self.random.random() < 0.05:
            late = self.random.choice(self.group.members)
            late.orders.append(("park", self.group.round - 1, None))
            late.orders.append(("go_on", self.group.round - 1, None))

    def _send(self, process: Process, order: tuple[str, int, Group | None]) -> None:
        if self.random.random() >= _LOST_ORDERS:
            process.orders.append(order)

    def _member(self, number: int) -> Process:
        """The process for a rank of the next round: kept, back from behind a cut, or new."""
        process = self.group.members[number]
        if process.is_cut:
            self._stale.append(process)
        elif not self._is_gone(process):
            return process
        for stale in self._stale:
            if stale.number == number and stale.is_alive and self.random.random() < 0.5:
                stale.is_cut, stale.is_asked_to_park = False, True
                if stale is not process:
                    self._stale.remove(stale)
                    return stale
        return self._new(number)
