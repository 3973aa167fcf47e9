"""Attribution on a real bus: one verdict for each incident, whichever replica is there."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from everstep.bus import connect
from everstep.bus.auth.roles import SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.errors import AskRefusedError
from everstep.bus.server.dev_server import DevServer
from everstep.evidence.archive import ArchiveMember, pack
from everstep.messages import (
    ActionDecided,
    ActionTaken,
    Case,
    CasesDocument,
    CorrectVerdict,
    Done,
    Message,
    ProgressMade,
    VerdictCorrected,
    VerdictReached,
)
from everstep_services.attribution.analyzers import ends
from everstep_services.attribution.domain.claims import Claim
from everstep_services.attribution.incident import Incident
from everstep_services.attribution.replica import AttributionReplica
from tests.integration.attribution.replicas import PEER, QUICK, Training, at_work, verdicts
from tests.integration.health.replicas import facts_of
from tests.waiting import until_async

TRACEBACK = b"""Traceback (most recent call last):
  File "/home/ann/train.py", line 31, in step
    labels = batch["labels"]
KeyError: 'labels'
"""


@pytest.fixture
async def bus(shared_nats: DevServer, tmp_path: Path) -> AsyncIterator[NatsBus]:
    settings = shared_nats.settings(SERVICE)
    async with connect(settings, "attribution", spool=tmp_path / "spool") as bus:
        yield bus


@pytest.fixture
async def training(bus: NatsBus, job: str) -> Training:
    return Training(bus, job)


async def case_of(training: Training) -> Case:
    document = await training.bus.documents("CASES").get(training.job)
    cases = msgspec.json.decode(document.data or b"", type=CasesDocument).cases
    (case,) = (case for case in cases if case.incident == training.incident)
    return case


async def verdict_in_force(training: Training) -> VerdictReached | None:
    return (await case_of(training)).verdict


async def until_weighed(replica: AttributionReplica, training: Training, pieces: int) -> None:
    """The case has this number of pieces of evidence, and no analysis of it is due or runs.

    The replica also has the incidents that earlier tests left on the server.
    """
    await until_async(
        lambda: case_of(training),
        "the evidence is in the case",
        holds=lambda case: len(case.evidence) == pieces,
    )
    case = (training.job, training.incident)
    await until_async(lambda: case not in replica.attribution._watches, "no analysis is due")


def correction(training: Training, cause: str = "data", **more: object) -> CorrectVerdict:
    asked = CorrectVerdict(
        job=training.job, incident=training.incident, by="ada", cause=cause,
        reason="the shard was cut short", culprit_ranks=(1,), origin="cli",
    )  # fmt: skip
    return replace(asked, **more)


async def correct(training: Training, cause: str = "data", **more: object) -> Done:
    question = correction(training, cause, **more)
    return await training.bus.ask(
        "attribution", "correct", question, Done, job=training.job, within_s=30
    )


async def test_two_replicas_reach_one_verdict(
    shared_nats: DevServer, job: str, tmp_path: Path
) -> None:
    """The rank that raised, not those that lost it (A7.1, A11.1)."""
    settings = shared_nats.settings(SERVICE)
    async with (
        connect(settings, "attribution", spool=tmp_path / "one") as one,
        connect(settings, "attribution", spool=tmp_path / "other") as other,
        at_work(one) as first,
        at_work(other) as second,
    ):
        training = Training(one, job)
        await training.fail()
        (verdict,) = await verdicts(one, job)
        assert (verdict.cause, verdict.culprit_ranks) == ("user_code", (3,))
        assert (verdict.culprit_nodes, verdict.revision) == ((), 0)
        assert "batch 17 has no labels" in verdict.reason
        assert await verdict_in_force(training) == verdict
        both = (first.statistics(), second.statistics())
        assert sum(each["leading"] for each in both) == 1
        for bus in (one, other):
            await bus.flush(30)
        assert len(await verdicts(one, job)) == 1


async def test_what_happened_while_nobody_was_there_is_judged_later(training: Training) -> None:
    """The service is away: the facts wait in the stream (A7.6)."""
    await training.fail()
    async with at_work(training.bus):
        (verdict,) = await verdicts(_real(training), training.job)
    assert verdict.cause == "user_code"


async def test_a_replica_that_takes_over_goes_on_and_repeats_nothing(training: Training) -> None:
    await training.fail()
    async with at_work(training.bus):
        await verdicts(_real(training), training.job)
    await training.close()
    first = training.incident
    training.round = 2
    async with at_work(training.bus):
        await training.fail()
        found = await verdicts(_real(training), training.job, 2)
    assert [one.incident for one in found] == [first, training.incident]
    assert [one.revision for one in found] == [0, 0]
    assert found[1].advice == "stop", "the same failure, and no step in between"


async def test_what_came_before_outlives_the_service_and_progress_forgives_it(
    training: Training,
) -> None:
    """Three failures alike, the service started anew between them; one retry is free (A4.5)."""
    asked: list[Message] = []

    async def stop(question: Message) -> Done:
        asked.append(question)
        return Done(text="round 3 ends")

    settings, incidents = replace(QUICK, user_errors="enforce"), list[str]()
    async with training.bus.answer("rendezvous", {"stop": stop}):
        for number in (1, 2, 3):
            training.round = number
            async with at_work(training.bus, settings):
                if number == 2:
                    made = training.about(step=50, node="n0", is_first=True)
                    await training.bus.record(ProgressMade(**made))
                await training.fail()
                await verdicts(_real(training), training.job, number)
                incidents.append(training.incident)
                if number == 3:
                    await facts_of(_real(training), ActionTaken, 1, training.job)
            await training.close()
    (decided,) = await facts_of(_real(training), ActionDecided, 1, training.job)
    (taken,) = await facts_of(_real(training), ActionTaken, 1, training.job)
    assert (decided.rule, decided.incident) == ("stop.user_error", incidents[2])
    assert (taken.outcome, taken.reason) == ("done", "round 3 ends")
    assert len(asked) == 1


async def test_later_evidence_amends_the_verdict_visibly(training: Training) -> None:
    async with at_work(training.bus) as replica:
        await training.form()
        for rank in (0, 1, 2):
            await training.exit(rank, "RuntimeError", PEER)
        await training.open()
        await training.stop()
        (early,) = await verdicts(_real(training), training.job)
        assert early.is_inconclusive
        await training.leave("log", TRACEBACK, rank=3)
        found = await verdicts(_real(training), training.job, 2)
        assert [one.revision for one in found] == [0, 1]
        assert (found[1].cause, found[1].culprit_ranks) == ("user_code", (3,))
        assert any(item.blob is not None for item in found[1].evidence)
        await training.leave("log", b"nothing of interest\n", rank=2)
        await until_weighed(replica, training, 2)
        assert await verdict_in_force(training) == found[1], "it says nothing else"


async def test_a_person_has_the_last_word_and_it_is_counted(training: Training) -> None:
    async with at_work(training.bus) as replica:
        await training.fail()
        await verdicts(_real(training), training.job)
        assert "data instead of user_code" in (await correct(training)).text
        (said,) = await facts_of(_real(training), VerdictCorrected, 1, training.job)
        assert (said.by, said.was_cause, said.is_confirmation) == ("ada", "user_code", False)
        held = (await verdicts(_real(training), training.job, 2))[-1]
        assert (held.cause, held.culprit_ranks, held.is_corrected) == ("data", (1,), True)
        assert held.alternatives[0].cause == "user_code"
        await training.leave("log", TRACEBACK, rank=0)
        await until_weighed(replica, training, 1)
        assert await verdict_in_force(training) == held
        assert len(await verdicts(_real(training), training.job, 2)) == 2
        assert "confirmed" in (await correct(training)).text
        counted = replica.statistics()
        assert (counted["corrections_total"], counted["confirmations_total"]) == (2, 1)


async def test_an_analysis_that_ends_after_a_correction_changes_nothing(training: Training) -> None:
    """Later evidence began it, and accuses another rank."""
    begun, gate = asyncio.Event(), asyncio.Event()

    async def accusing(incident: Incident) -> list[Claim]:
        if not incident.case.evidence:
            return []
        begun.set()
        await gate.wait()
        return [Claim(cause="gpu", kind="seen", says="it was n1", strength=1.0, nodes=("n1",))]

    analyzers = {"ends": ends.analyze, "accusing": accusing}
    async with at_work(training.bus, QUICK, analyzers) as replica:
        await training.fail()
        await verdicts(_real(training), training.job)
        await training.leave("log", TRACEBACK, rank=0)
        await begun.wait()
        await correct(training)
        held = (await verdicts(_real(training), training.job, 2))[-1]
        assert (held.cause, held.culprit_ranks, held.is_corrected) == ("data", (1,), True)
        gate.set()
        await until_weighed(replica, training, 1)
        assert await verdict_in_force(training) == held
        assert len(await verdicts(_real(training), training.job, 2)) == 2


async def test_what_cannot_be_corrected_is_refused_with_the_remedy(training: Training) -> None:
    async with at_work(training.bus):
        await training.fail()
        await verdicts(_real(training), training.job)
        with pytest.raises(AskRefusedError, match="'bad luck' is not a cause: use one of"):
            await correct(training, "bad luck")
        with pytest.raises(AskRefusedError, match="ranks begin at 0, got -1"):
            await correct(training, culprit_ranks=(-1,))
        with pytest.raises(AskRefusedError, match="no rank 4: the round had ranks 0 to 3"):
            await correct(training, culprit_ranks=(1, 4))
        with pytest.raises(AskRefusedError, match="the name of its author"):
            await correct(training, by=" ")
        training.incident = "nothing-of-the-kind"
        with pytest.raises(AskRefusedError, match="everstep incidents"):
            await correct(training)


async def test_a_verdict_comes_by_its_deadline_though_nodes_are_silent(training: Training) -> None:
    settings = replace(QUICK, first_within_s=0.2)
    async with at_work(training.bus, settings):
        await training.form()
        await training.exit(3, "ValueError", "bad")
        await training.open()
        (verdict,) = await verdicts(_real(training), training.job)
    assert verdict.culprit_ranks == (3,)


async def test_a_thousand_ranks_that_fail_together_are_one_verdict(bus: NatsBus, job: str) -> None:
    """One incident, bounded work (A7.1)."""
    training = Training(bus, job, nodes=125, ranks=8)
    async with at_work(bus) as replica:
        await training.form()
        await training.open()
        for rank in range(1000):
            await training.exit(rank, "NameError", "name 'lr' is not defined")
        (verdict,) = await verdicts(bus, job)
        assert "every rank" in verdict.reason
        assert verdict.culprit_ranks[:3] == (0, 1, 2)
        assert (await bus.documents("CASES").get(job)).data is not None
        assert replica.statistics()["conflicts_total"] == 0


async def test_archives_that_are_damaged_are_missing_and_the_rest_counts(
    training: Training,
) -> None:
    """Hostile evidence costs itself (A13.3)."""
    async with at_work(training.bus):
        await training.form()
        await training.exit(0, "RuntimeError", PEER)
        await training.open()
        await training.leave("log", b"\x1f\x8bnot a gzip")
        good = [ArchiveMember(3, "txt", TRACEBACK)]
        await training.leave("log", pack(good, {2: "the rank had exited"}))
        await training.leave(
            "flight_recorder", pack([ArchiveMember(1, "pickle", b"cos\nsystem\n.")], {})
        )
        await training.stop()
        (verdict, *_) = await verdicts(_real(training), training.job)
    assert (verdict.cause, verdict.culprit_ranks) == ("user_code", (3,))
    said = "; ".join(verdict.missing)
    assert "cannot be unpacked" in said
    assert "log of rank 2: the rank had exited" in said
    assert "flight_recorder" in said


@pytest.mark.parametrize("says", [True, False])
async def test_a_slow_analyzer_is_left_out_at_first_and_asked_once_more(
    training: Training, *, says: bool
) -> None:
    gate = asyncio.Event()

    async def slow(_: Incident) -> list[Claim]:
        await gate.wait()
        seen = Claim(cause="gpu", kind="seen", says="it was n1", strength=1.0, nodes=("n1",))
        return [seen] if says else []

    settings = replace(QUICK, analyzer_within_s=0.3)
    async with at_work(training.bus, settings, {"ends": ends.analyze, "slow": slow}):
        await training.form()
        await training.exit(3)
        await training.open()
        await training.stop()
        (early, *_) = await verdicts(_real(training), training.job)
        assert any("slow was not done after 0.3 s" in text for text in early.missing)
        gate.set()
        found = await verdicts(_real(training), training.job, 2)
    assert not any("not done after" in text for text in found[-1].missing)
    same = (early.cause, early.culprit_nodes)
    assert (found[-1].cause, found[-1].culprit_nodes) == (("gpu", ("n1",)) if says else same)


def _real(training: Training) -> NatsBus:
    assert isinstance(training.bus, NatsBus)
    return training.bus
