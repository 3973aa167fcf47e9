"""Processes of ranks that outlive rounds, in a model; their agreements are real.

A state has a number that depends on all that was ever computed: who trains on a wrong, torn, old
or mixed state has another number than an undisturbed training. Its history tells in which rounds
its steps were made, as steps that are made twice need not be equal to the bit. Each process is a
generator: at each of its `yield`s any other may go on, be killed, hang or be cut off.
"""

from collections.abc import Generator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from trainer_sdk.survive.agreement import (
    FRESH,
    IMAGE,
    CopyResult,
    HealPlan,
    RankHolding,
    after_failures,
    agree,
    failed_copies,
    needs_images,
    unequal_replicas,
)

if TYPE_CHECKING:
    from tests.sim.survivors import Trial

Course = Generator[None, None, None]
STEPS = 6
_IMAGE_EVERY = 2


class Layout(NamedTuple):
    """The place of each rank, and whether its optimizer waits for others."""

    places: tuple[int, ...]
    nodes: tuple[str, ...]
    is_optimizer_collective: bool = False


LAYOUTS = {
    "DDP 4": Layout((0,) * 4, tuple("aabb")),
    "DDP 8": Layout((0,) * 8, tuple("aaaabbbb")),
    "HSDP 2 x 2": Layout((0, 1, 0, 1), tuple("aabb")),
    "HSDP 2 x 2, collective optimizer": Layout((0, 1, 0, 1), tuple("aabb"), True),
    "FSDP 4": Layout((0, 1, 2, 3), tuple("aabb")),
    "pipeline 2 x DP 2": Layout((0, 0, 1, 1), tuple("abab")),
}


class State(NamedTuple):
    """The bytes of a rank's part."""

    value: int
    history: int


class BrokenError(Exception):
    """A collective is broken, or the round is over."""


class Reference:
    """The states of a training that nobody disturbs."""

    def __init__(self, places: tuple[int, ...]) -> None:
        values = [first_value(place) for place in places]
        self.values = [values]
        for _ in range(STEPS):
            values = [next_value(value, values) for value in values]
            self.values.append(values)


def first_value(place: int) -> int:
    return hash((place, 1))


def next_value(value: int, of_all: list[int]) -> int:
    """The state of a rank after a step, to which all ranks contribute."""
    return hash((value, *of_all))


@dataclass(eq=False, repr=False)
class Group:
    """The process group of a round."""

    trial: "Trial"
    round: int
    members: "list[Process]"
    boxes: dict[int, dict[int, Any]] = field(default_factory=dict)
    plans: dict[int, HealPlan] = field(default_factory=dict)

    @property
    def has_lost(self) -> bool:
        """Whether a connection to a rank is closed."""
        return any(
            not each.is_alive or each.group is not self or each.has_left for each in self.members
        )

    def exchange(self, process: "Process", sent: Any) -> Generator[None, None, list[Any]]:
        """What all ranks send; where a rank is lost it may succeed on some, and fail on others."""
        call, process.calls = process.calls, process.calls + 1
        box = self.boxes.setdefault(call, {})
        yield
        while not process.hears():
            yield
        assert process.number not in box, "two processes are the same rank of a group"
        assert process.round == self.round, "a process of an older round takes part"
        box[process.number] = sent
        while True:
            yield
            if not process.hears():
                continue
            if process.is_asked_to_park:
                raise BrokenError
            is_whole, has_lost = len(box) == len(self.members), self.has_lost
            if is_whole and not (has_lost and self.trial.random.random() < 0.5):
                return [box[number] for number in range(len(self.members))]
            if has_lost:
                raise BrokenError


@dataclass(eq=False, repr=False)
class Process:
    """A process of a rank, in as many rounds as it lives."""

    trial: "Trial"
    number: int
    node: str
    place: int = 0
    step: int | None = None
    state: State | None = None
    is_torn: bool = False
    made_in: int = 0
    round: int = 0
    group: Group | None = None
    calls: int = 0
    is_alive: bool = True
    is_cut: bool = False
    is_hung: bool = False
    has_left: bool = True
    """Whether it is in no group, and waits for orders."""
    is_asked_to_park: bool = False
    parked_in: int = -1
    """The last round in which it has told that it is parked."""
    is_done: bool = False
    orders: list[tuple[str, int, Group | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.course = self._live()

    def hears(self) -> bool:
        """Whether messages of others reach it."""
        return not self.is_cut

    def advance(self) -> None:
        """Read the orders that have arrived, and go on to the next yield."""
        if self.is_hung or self.is_done:
            return
        if not self.is_cut:
            self._read_orders()
        next(self.course, None)

    def _read_orders(self) -> None:
        for kind, round_, group in self.orders:
            # It may have begun a round that has ended by now.
            if kind == "park" and round_ >= self.round:
                self.is_asked_to_park = True
                if self.has_left:
                    self.parked_in = round_
            elif kind == "go_on" and group is not None and self._may_begin(round_):
                self.round, self.group, self.calls = round_, group, 0
                self.has_left = self.is_asked_to_park = False
        self.orders.clear()

    def _may_begin(self, round_: int) -> bool:
        return self.has_left and round_ > max(self.round, self.parked_in)

    def _live(self) -> Course:
        while True:
            while self.has_left:
                yield
            try:
                yield from self._recover()
                yield from self._train()
            except BrokenError:
                self.has_left = True
                continue
            self.is_done = True
            return

    def _holding(self) -> RankHolding:
        return RankHolding(
            rank=self.number,
            place=str(self.place),
            step=self.step,
            is_torn=self.is_torn,
            node=self.node,
            made_in=self.made_in,
        )

    def _recover(self) -> Course:
        assert self.group is not None
        group, attempt = self.group, 0
        holdings = yield from group.exchange(self, self._holding())
        while True:
            if needs_images(holdings):
                steps = yield from group.exchange(self, self.trial.image_steps())
                holdings = [
                    msgspec.structs.replace(holding, images=images)
                    for holding, images in zip(holdings, steps, strict=True)
                ]
            plan = agree(holdings)
            self.trial.check_plan(group, attempt, plan, holdings)
            if not plan.is_live:
                yield from self._begin_at(plan)
                return
            failed = yield from self._copy(plan)
            if not failed:
                return
            holdings, attempt = after_failures(holdings, plan, failed), attempt + 1
            assert attempt < 2 * len(holdings), "ranks copy for ever"

    def _begin_at(self, plan: HealPlan) -> Course:
        assert self.group is not None
        self.is_torn = True
        yield
        source = plan.sources[self.number]
        assert source in (IMAGE, FRESH)
        if plan.step is None:
            self.state, self.step = State(first_value(self.place), 0), 0
        else:
            self.state, self.step = self.trial.image_of(self.number, plan.step), plan.step
        self.made_in = self.round
        yield from self.group.exchange(self, "restored")
        self.is_torn = False

    def _copy(self, plan: HealPlan) -> Generator[None, None, dict[int, str]]:
        assert self.group is not None
        source, copied, result = plan.sources[self.number], None, CopyResult(equal=str(self.state))
        if isinstance(source, int):
            self.is_torn, self.state = True, None
            donor = self.group.members[source]
            yield
            copied = donor.state  # while the donor may be killed, or be in another round already
            if self.trial.spoils_copy():
                copied = State(-1, -1)
            yield
            error = "" if donor.is_alive else "its memory is gone"
            result = CopyResult(error=error, equal=str(copied))
        results = yield from self.group.exchange(self, result)
        assert not unequal_replicas(plan, results)
        failed = failed_copies(plan, results)
        if isinstance(source, int) and self.number not in failed:
            self.state, self.step, self.made_in = copied, plan.step, plan.made_in
            self.is_torn = False
        return failed

    def _train(self) -> Course:
        assert self.group is not None
        assert self.step is not None
        group = self.group
        while self.step < STEPS:
            self.trial.check_state(self)
            contributed = yield from group.exchange(self, (self.step, self.state))
            assert {step for step, _ in contributed} == {self.step}, "ranks train at other steps"
            histories = {state.history for _, state in contributed}
            assert len(histories) == 1, "ranks train on states of other rounds"
            assert self.state is not None
            before, self.state, self.is_torn = self.state, None, True
            yield
            if self.trial.layout.is_optimizer_collective:
                yield from group.exchange(self, "optimizer")
            value = next_value(before.value, [state.value for _, state in contributed])
            self.state = State(value, hash((before.history, self.round)))
            self.step, self.made_in, self.is_torn = self.step + 1, self.round, False
            self.trial.reached[self.number] = max(self.trial.reached[self.number], self.step)
            yield
            if self.step % _IMAGE_EVERY == 0:
                self.trial.save(self)
            yield
            if self.is_asked_to_park:
                raise BrokenError
        self.trial.check_state(self)
        yield from group.exchange(self, "end")
