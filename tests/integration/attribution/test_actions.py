"""The policy asks rendezvous and health, puts each use on record, and never asks twice."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from msgspec.structs import replace

from everstep.bus.derived_ids import DerivedIds
from everstep.bus.ports import Bus
from everstep.clock import SystemClock
from everstep.messages import (
    ActionDecided,
    ActionTaken,
    Case,
    CasesDocument,
    Done,
    Message,
    PastIncident,
    PolicyAct,
    RoundDocument,
    VerdictReached,
)
from everstep.messages.codec import decode
from everstep_services.attribution.actions import VerdictActions
from everstep_services.attribution.cases import BUCKET, CaseKeeper, encoded
from everstep_services.attribution.domain.policy import PolicySwitches
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.unit.attribution.test_policy import BROKEN, BUG, ON, past, verdict
from tests.unit.rendezvous.documents import round_document
from tests.waiting import WITHIN_S, until_async


class Asked:
    """Answers for rendezvous and health, and remembers what was asked."""

    def __init__(self, document: RoundDocument | None = None, *, refused: str = "") -> None:
        self.questions: list[Any] = []
        self._document = document
        self._refused = refused

    async def __call__(self, question: Message) -> Message:
        self.questions.append(question)
        if type(question).__name__ == "ShowRound":
            assert self._document is not None
            return self._document
        is_refused = type(question).__name__ == self._refused
        return Done(text="no" if is_refused else "it is done", is_refused=is_refused)


@asynccontextmanager
async def acting(
    bus: Bus, switches: PolicySwitches, asked: Asked, keeper: CaseKeeper | None = None
) -> AsyncIterator[VerdictActions]:
    keeper = keeper or CaseKeeper(bus, SystemClock(), keep_days=1)
    ids = DerivedIds(bus, SystemClock())
    actions = VerdictActions(switches, keeper, bus, SystemClock(), ids)
    await remember(bus)
    async with (
        bus.answer("rendezvous", dict.fromkeys(("stop", "drain", "show"), asked)),
        bus.answer("health", {"exclude": asked}),
    ):
        loops = [asyncio.create_task(loop()) for loop in (ids.keep_for_ever, actions.act_for_ever)]
        try:
            yield actions
        finally:
            for task in loops:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task


async def remember(bus: Bus, *acts: PolicyAct, job: str = "j") -> None:
    """Have the case of incident i9 in the store, unless it is there."""
    documents = bus.documents(BUCKET)
    if (await documents.get(job)).data is None:
        case = Case(job=job, incident="i9", round=1, acts=acts)
        await documents.put(job, encoded(CasesDocument(cases=(case,))), revision=0)


async def recorded(bus: Bus, count: int) -> list[Any]:
    found: list[Any] = []
    async with asyncio.timeout(WITHIN_S), bus.facts(None) as reader:
        while len(found) < count:
            found += [decode(one.data) for one in (await reader.fetch(10, 0.1)).facts]
    return found


@pytest.mark.parametrize("mode", ["observe", "enforce"])
async def test_a_bug_that_came_again_stops_the_job_once(mode: str) -> None:
    """Observed or enforced, on record either way (A4.6)."""
    asked, bus = Asked(), MemoryBus(MemoryServer())
    again: VerdictReached = verdict(**BUG)
    before: list[PastIncident] = [past("i8")]
    switches = ON if mode == "enforce" else PolicySwitches()
    async with acting(bus, switches, asked) as actions:
        actions.consider(again, 10, before)
        actions.consider(again, 10, before)
        decided, taken = await recorded(bus, 2)
    assert isinstance(decided, ActionDecided)
    assert isinstance(taken, ActionTaken)
    assert (decided.rule, decided.mode, decided.incident) == ("stop.user_error", mode, "i9")
    assert taken.decision == decided.id
    assert taken.outcome == ("done" if mode == "enforce" else "observed")
    assert len(asked.questions) == (mode == "enforce")


@pytest.mark.parametrize(("by", "outcome"), [("attribution", "done"), ("ann", "failed")])
async def test_a_job_that_the_policy_has_stopped_before_is_stopped_as_asked(
    by: str, outcome: str
) -> None:
    """Another incident of it may have asked, or the first answer was lost (A4.6)."""
    document = round_document("j", seats=2, name_characters=12)
    document = replace(document, phase="stopped", reason=f"{by} stopped the job: enough")
    asked, bus = Asked(document, refused="StopJob"), MemoryBus(MemoryServer())
    async with acting(bus, ON, asked) as actions:
        actions.consider(verdict(**BUG), 10, [past("i8")])
        _, taken = await recorded(bus, 2)
    assert taken.outcome == outcome
    assert taken.reason == (
        "the job is stopped already, as it was asked for before" if outcome == "done" else "no"
    )


@pytest.mark.parametrize("spares", [1, 0])
async def test_a_repeat_offender_is_replaced_only_by_a_spare(spares: int) -> None:
    """Health first, then rendezvous; without a spare nothing is asked (A7.1)."""
    document = round_document("j", seats=2 + spares, name_characters=12)
    document = replace(document, slots=2)
    node = document.seats[0].node
    asked, bus = Asked(document), MemoryBus(MemoryServer())
    before = [past("i8", cause="host", nodes=(node,))]
    async with acting(bus, ON, asked) as actions:
        actions.consider(verdict(**{**BROKEN, "culprit_nodes": (node,)}), 10, before)
        decided, taken = await recorded(bus, 2)
    assert (decided.action, decided.nodes_out) == ("replace", (node,))
    kinds = [type(one).__name__ for one in asked.questions]
    if spares:
        assert taken.outcome == "done"
        assert kinds == ["ShowRound", "ExcludeNode", "DrainNode"]
        assert {one.node for one in asked.questions[1:]} == {node}
    else:
        assert (taken.outcome, kinds) == ("failed", ["ShowRound"])
        assert "no spare stands by" in taken.reason


@pytest.mark.parametrize(("seats", "outcome"), [(4, "done"), (3, "failed")])
async def test_a_node_of_a_replacement_group_is_replaced_only_by_a_whole_group(
    seats: int, outcome: str
) -> None:
    document = round_document("j", seats=seats, name_characters=12)
    document = replace(
        document,
        slots=2,
        spec=replace(document.spec, slots_per_group=2),
        seats=tuple(
            replace(seat, place=f"rack-{number // 2}") for number, seat in enumerate(document.seats)
        ),
    )
    node = document.seats[0].node
    asked, bus = Asked(document), MemoryBus(MemoryServer())
    before = [past("i8", cause="host", nodes=(node,))]
    async with acting(bus, ON, asked) as actions:
        actions.consider(verdict(**{**BROKEN, "culprit_nodes": (node,)}), 10, before)
        _, taken = await recorded(bus, 2)
    assert taken.outcome == outcome
    assert ("no spare group stands by" in taken.reason) == (outcome == "failed")


async def test_a_node_that_is_excluded_and_not_drained_is_on_record_as_that() -> None:
    document = replace(round_document("j", seats=3, name_characters=12), slots=2)
    node = document.seats[0].node
    asked, bus = Asked(document, refused="DrainNode"), MemoryBus(MemoryServer())
    before = [past("i8", cause="host", nodes=(node,))]
    async with acting(bus, ON, asked) as actions:
        actions.consider(verdict(**{**BROKEN, "culprit_nodes": (node,)}), 10, before)
        _, taken = await recorded(bus, 2)
    assert taken.outcome == "done"
    assert taken.reason == "it is done; it is excluded, and not drained: no"


async def test_another_replica_does_not_act_again() -> None:
    """Neither one that takes over, nor this one after it was started again (A4.6)."""
    asked, bus = Asked(), MemoryBus(MemoryServer())
    again, before = verdict(**BUG), [past("i8")]
    for later in ("k1", "k2"):
        await remember(bus, job=later)
        async with acting(bus, ON, asked) as actions:
            actions.consider(again, 10, before)
            actions.consider(verdict(**{**BUG, "job": later}), 10, [past("i8", job=later)])
            # Verdicts are considered one after the other: the first is over by then.
            await until_async(lambda: [ask for ask in asked.questions if ask.job == later], later)  # noqa: B023
    assert [ask.job for ask in asked.questions] == ["j", "k1", "k2"]


async def test_what_an_earlier_leader_has_not_finished_is_reported_and_not_asked_again() -> None:
    asked, bus = Asked(), MemoryBus(MemoryServer())
    await remember(bus, PolicyAct(decision="d1", action="stop"))
    keeper = CaseKeeper(bus, SystemClock(), keep_days=1)
    await keeper.begin()
    keeper.leads = True
    for _ in range(2):
        async with acting(bus, ON, asked, keeper) as actions:
            await actions.close_unfinished(keeper.all_cases())
    (taken,) = await recorded(bus, 1)
    assert isinstance(taken, ActionTaken)
    assert (taken.decision, taken.action, taken.outcome) == ("d1", "stop", "failed")
    assert [act.is_over for case in keeper.all_cases() for act in case.acts] == [True]
    assert asked.questions == []
