"""Every incident gets a verdict, however late, and whoever leads."""

import asyncio
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from msgspec.structs import replace

from everstep.bus import connect
from everstep.bus.auth.roles import SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.ports import Held
from everstep.bus.server.dev_server import DevServer
from everstep.messages import ActionDecided, Case, VerdictReached
from everstep_services.attribution.analyzers import ends
from everstep_services.attribution.domain.claims import Claim
from everstep_services.attribution.domain.combiner import CaseJudgement
from everstep_services.attribution.domain.past import PastIncidents
from everstep_services.attribution.incident import Analyzer, Incident
from tests.integration.attribution.replicas import QUICK, Training, at_work, verdicts
from tests.integration.health.replicas import facts_of
from tests.waiting import until_async

MANY = 30
SOON = replace(QUICK, first_within_s=0.1)


@pytest.fixture
async def bus(shared_nats: DevServer, tmp_path: Path) -> AsyncIterator[NatsBus]:
    settings = shared_nats.settings(SERVICE)
    async with connect(settings, "attribution", spool=tmp_path / "spool") as bus:
        yield bus


async def fail_often(training: Training, count: int) -> list[str]:
    """Incidents one after the other, each in a round of its own, faster than they are judged."""
    incidents = []
    for number in range(1, count + 1):
        training.round = number
        await training.form()
        await training.exit(3, "ValueError", f"batch {number} has no labels")
        await training.open()
        incidents.append(training.incident)
        await training.close()
    return incidents


async def judged(bus: NatsBus, job: str, incidents: list[str]) -> set[str]:
    """The incidents that have a verdict, once all of these have one."""
    found: list[VerdictReached] = []
    while not {verdict.incident for verdict in found} >= set(incidents):
        found = await verdicts(bus, job, len(found) + 1)
    return {verdict.incident for verdict in found}


async def take_lease_away(bus: NatsBus) -> None:
    """As on a machine so loaded that the leader did not renew its lease within ten seconds."""
    held = await bus.documents("LEASES").get("attribution")
    await bus.leases.release(Held("attribution", "", 10, held.revision))


async def test_each_of_many_incidents_is_judged_though_leaders_lose_their_lease(
    bus: NatsBus, job: str
) -> None:
    """Its first leader loses its lease amid its analyses, and all leaders after it end."""
    training = Training(bus, job)
    gate, under_way = asyncio.Event(), asyncio.Event()

    async def stuck(incident: Incident) -> list[Claim]:
        if incident.case.job == job:
            under_way.set()
            await gate.wait()
        return []

    async with at_work(bus, SOON, {"ends": ends.analyze, "stuck": stuck}):
        incidents = await fail_often(training, MANY)
        await under_way.wait()
        async with at_work(bus, SOON):
            await take_lease_away(bus)
            gate.set()
            await verdicts(bus, job, 1)
    async with at_work(bus, SOON):
        assert await judged(bus, job, incidents) == set(incidents)


async def test_an_analysis_that_always_fails_ends_with_a_verdict_and_delays_no_other(
    bus: NatsBus, job: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = Training(bus, job)
    settings = replace(SOON, at_once=1)
    async with at_work(bus, settings) as replica:
        examine = replica.attribution._examiner.examine

        async def failing(
            case: Case, history: PastIncidents, within_s: float
        ) -> tuple[CaseJudgement, bool]:
            if case.incident == incidents[0]:
                raise ValueError("these bytes are nothing")
            return await examine(case, history, within_s)

        incidents = [""]
        monkeypatch.setattr(replica.attribution._examiner, "examine", failing)
        incidents[:] = await fail_often(training, 1)
        incidents += await fail_often(training, 2)
        assert await judged(bus, job, incidents) >= set(incidents)
        found = {verdict.incident: verdict for verdict in await verdicts(bus, job, 3)}
    broken = found.pop(incidents[0])
    assert (broken.cause, broken.is_inconclusive) == ("unknown", True)
    assert "the analysis failed 3 times: ValueError: these bytes are nothing" in broken.missing[0]
    assert {verdict.cause for verdict in found.values()} == {"user_code"}


def accusing(node: str, gate: asyncio.Event, begun: asyncio.Event) -> Analyzer:
    """An analysis that accuses this node, and takes until the gate is open."""

    async def analyze(_: Incident) -> list[Claim]:
        begun.set()
        await gate.wait()
        return [Claim(cause="gpu", kind="seen", says="it was that", strength=1.0, nodes=(node,))]

    return analyze


@pytest.mark.parametrize("is_late", [False, True])
async def test_an_incident_that_another_takes_over_is_not_an_earlier_offence(
    bus: NatsBus, job: str, is_late: bool
) -> None:
    """A result that stops a job has an incident of the agent, and that of the round's end.

    The first is judged before the second takes it over, or its analysis ends later.
    """
    training = Training(bus, job)
    training.names = (f"{job}-0", f"{job}-1")
    begun, gate, incidents = asyncio.Event(), asyncio.Event(), []
    analyzers = {"numerics": accusing(training.names[1], gate, begun)}
    async with at_work(bus, SOON, analyzers) as replica:
        await training.form()
        for count in (0, 1, 2):
            await training.open()
            incidents.append(training.incident)
            if count or not is_late:
                gate.set()
                await verdicts(bus, job, count + (not is_late))
                await training.close("recovered" if count else "merged")
                continue
            await begun.wait()
            await training.close("merged")
            await until_async(
                partial(replica.attribution._keeper.case, job, training.incident),
                "the incident is merged",
                holds=lambda case: case.outcome == "merged",
            )
        decided = await facts_of(bus, ActionDecided, 1, job)
    assert decided[0].incident == incidents[2]
