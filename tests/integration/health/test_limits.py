"""Limits on a real bus: two replicas learn the same, once; people set them; nothing is lost."""

from collections.abc import Awaitable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from msgspec.structs import replace

from everstep import ids, subjects
from everstep.bus import connect
from everstep.bus.auth.roles import SERVICE
from everstep.bus.client import NatsBus
from everstep.bus.errors import AskRefusedError
from everstep.bus.server.dev_server import DevServer
from everstep.messages import (
    Done,
    LimitsDocument,
    LimitsLearned,
    NodeBeat,
    OperatorActed,
    ProgressMade,
    SectionLimit,
    SectionSeen,
    SetControl,
    SetLimit,
    ShowLimits,
    encode,
)
from everstep_services.health.settings import HealthSettings, LimitSettings
from tests.integration.health.replicas import at_work, facts_of, limits
from tests.unit.rendezvous.documents import round_document
from tests.waiting import until_async

QUICK = HealthSettings(limits=LimitSettings(write_every_s=0.05))


def seen(section: str, longest_s: float) -> SectionSeen:
    return SectionSeen(section=section, kind="plain", longest_s=longest_s, observations=9)


class Agents:
    """Nodes whose every beat says how long sections take."""

    def __init__(self, bus: NatsBus, job: str) -> None:
        self._bus = bus
        self._job = job
        self.round = 1
        self.config = "one"
        self.sections: dict[str, tuple[SectionSeen, ...]] = {}
        self._sequence = 0

    def beat(self) -> None:
        self._sequence += 1
        for node, sections in self.sections.items():
            beat = NodeBeat(
                job=self._job,
                node=node,
                sequence=self._sequence,
                at=datetime.now(UTC),
                state="running",
                round=self.round,
                slot=0,
                sections=sections,
                config_fingerprint=self.config,
            )
            self._bus.send(subjects.beat(self._job, node), beat)

    async def teach(self, section: str, limit_s: float) -> LimitsDocument:
        """Beat until this limit was learned."""

        def look() -> Awaitable[LimitsDocument | None]:
            self.beat()
            return limits(self._bus, self._job)

        def holds(document: LimitsDocument) -> bool:
            return (section, limit_s) in {(one.section, one.limit_s) for one in document.limits}

        return await until_async(look, f"a limit of {limit_s} s for {section!r}", holds=holds)


async def test_two_replicas_learn_the_longest_of_all_nodes_and_say_so_once_each(
    shared_nats: DevServer, job: str, tmp_path: Path
) -> None:
    settings = shared_nats.settings(SERVICE)
    async with (
        connect(settings, "health", spool=tmp_path / "one") as one,
        connect(settings, "health", spool=tmp_path / "other") as other,
        connect(settings, "agents", spool=tmp_path / "agents") as agents_bus,
        at_work(one, QUICK),
        at_work(other, QUICK),
    ):
        agents = Agents(agents_bus, job)
        agents.sections = {"a": (seen("data", 40),), "b": (seen("data", 60), seen("", 1))}
        document = await agents.teach("data", 300)
        assert {(one.section, one.source) for one in document.limits} == {
            ("data", "learned"),
            ("", "floor"),
        }
        assert (document.round, document.config_fingerprint) == (1, "one")
        agents.sections["a"] = (seen("data", 200),)
        await agents.teach("data", 1000)
        started = ProgressMade(
            id=ids.new_id(),
            job=job,
            at=datetime.now(UTC),
            source="agent",
            round=1,
            step=1,
            is_first=True,
            steps_s=1000.0,
        )
        await agents_bus.record(started)
        await until_async(
            lambda: limits(one, job), "the first step", holds=lambda d: d.first_step_limit_s == 5000
        )
        agents.round, agents.config = 2, "two"
        agents.sections = {"a": (seen("data", 30),)}
        document = await agents.teach("data", 150)
        assert [one.section for one in document.limits] == ["data"]
        assert document.first_step_limit_s == 7200
        learned = await until_async(
            lambda: facts_of(one, LimitsLearned, job=job),
            "the last limits are on record",
            holds=lambda found: found[-1].limits == document.limits,
        )
    revisions = [fact.revision for fact in learned]
    assert len(set(revisions)) == len(revisions), "no revision is sent twice"


async def test_nothing_is_set_for_a_job_that_nobody_knows(
    shared_nats: DevServer, job: str, tmp_path: Path
) -> None:
    limit = SectionLimit(section="data", limit_s=7.0, source="configured")
    who = {"job": job, "by": "ann", "reason": "a typo", "origin": "cli"}
    asked = {
        "set_limit": SetLimit(limit=limit, **who),
        "control": SetControl(changes={"modes.exclude": "observe"}, **who),
    }
    async with (
        connect(shared_nats.settings(SERVICE), "health", spool=tmp_path / "one") as bus,
        at_work(bus, QUICK),
    ):
        for verb, question in asked.items():
            with pytest.raises(AskRefusedError, match=f"there is no job {job}") as caught:
                await bus.ask("health", verb, question, Done, job=job, within_s=30)
            assert caught.value.code == "404"
        for bucket in ("LIMITS", "CONTROL"):
            assert (await bus.documents(bucket).get(job)).data is None
        acts = await facts_of(bus, OperatorActed, 2, job=job)
    assert {act.outcome for act in acts} == {"refused"}


async def test_the_answer_tells_that_the_job_is_over(
    shared_nats: DevServer, job: str, tmp_path: Path
) -> None:
    document = round_document(job, seats=1, name_characters=8)
    limit = SectionLimit(section="data", limit_s=7.0, source="configured")
    ask = SetLimit(job=job, limit=limit, by="ann", reason="late", origin="cli")
    async with (
        connect(shared_nats.settings(SERVICE), "health", spool=tmp_path / "one") as bus,
        at_work(bus, QUICK),
    ):
        for phase, is_over in (("running", False), ("stopped", True)):
            stored = encode(replace(document, phase=phase))
            await bus.documents("ROUNDS").put(job, stored, revision=None)
            done = await bus.ask("health", "set_limit", ask, Done, job=job, within_s=30)
            assert done.text.endswith("only if it is started again") == is_over


async def test_people_set_a_limit_and_have_it_learned_again(
    shared_nats: DevServer, job: str, tmp_path: Path
) -> None:
    settings = shared_nats.settings(SERVICE)

    async def set_limit(bus: NatsBus, limit_s: float) -> Done:
        limit = SectionLimit(section="data", limit_s=limit_s, source="configured")
        ask = SetLimit(job=job, limit=limit, by="ann", reason="long reads", origin="cli")
        return await bus.ask("health", "set_limit", ask, Done, job=job, within_s=30)

    async with (
        connect(settings, "health", spool=tmp_path / "one") as bus,
        connect(settings, "agents", spool=tmp_path / "agents") as agents_bus,
        at_work(bus, QUICK),
    ):
        agents = Agents(agents_bus, job)
        shown = await bus.ask(
            "health", "limits", ShowLimits(job=job), LimitsDocument, job=job, within_s=30
        )
        assert (shown.limits, shown.first_step_limit_s) == ((), 7200)
        agents.sections = {"a": (seen("data", 40),)}
        await agents.teach("data", 200)
        assert "section data is 7 s from now on" in (await set_limit(bus, 7)).text
        agents.sections = {"a": (seen("data", 100), seen("more", 100))}
        document = await agents.teach("more", 500)
        assert document.limits[0].limit_s == 7
        await set_limit(bus, 0)
        await agents.teach("data", 500)
        with pytest.raises(AskRefusedError, match="cannot use a limit of -1 s for 'data'"):
            await set_limit(bus, -1)
        acts = await facts_of(bus, OperatorActed, 3, job=job)
    assert [(act.target, act.outcome) for act in acts] == [
        ("data=7 s", "accepted"),
        ("data=auto", "accepted"),
        ("data=-1 s", "refused"),
    ]
    assert {(act.by, act.action, act.origin) for act in acts} == {("ann", "set_limit", "cli")}


async def test_a_document_that_was_lost_is_made_again(
    shared_nats: DevServer, job: str, tmp_path: Path
) -> None:
    async with (
        connect(shared_nats.settings(SERVICE), "health", spool=tmp_path / "one") as bus,
        at_work(bus, QUICK),
    ):
        agents = Agents(bus, job)
        agents.sections = {"a": (seen("data", 40),)}
        before = await agents.teach("data", 200)
        await bus.documents("LIMITS").delete(job, revision=None)
        assert await agents.teach("data", 200) == before


async def test_what_a_newer_release_has_written_is_left_alone(
    shared_nats: DevServer, job: str, tmp_path: Path
) -> None:
    """An older health service goes on, and does not write over it (A15.3)."""
    strange = b'{"type":"limits_document.v2"}'
    async with (
        connect(shared_nats.settings(SERVICE), "health", spool=tmp_path / "one") as bus,
        at_work(bus, QUICK) as health,
    ):
        agents = Agents(bus, job)
        await bus.documents("LIMITS").put(job, strange, revision=0)
        agents.sections = {"a": (seen("data", 40),)}
        with pytest.raises(AskRefusedError, match="limits_document.v2"):
            await bus.ask(
                "health", "limits", ShowLimits(job=job), LimitsDocument, job=job, within_s=30
            )
        beats = health.statistics()["beats_total"] + 20

        def heard() -> bool:
            agents.beat()
            return health.statistics()["beats_total"] >= beats

        await until_async(heard, "it goes on")
        assert (await bus.documents("LIMITS").get(job)).data == strange
