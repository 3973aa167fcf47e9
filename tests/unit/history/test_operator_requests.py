"""What people want done is asked of rendezvous; each way to fail has its own error and words."""

import asyncio
from typing import Any

import pytest

from everstep.bus.ports import Handler
from everstep.bus.requests import RefusalError
from everstep.messages import (
    Done,
    DrainNode,
    ExcludeNode,
    IncludeNode,
    Message,
    RequestEvidence,
    RestartJob,
    SectionLimit,
    SetControl,
    SetLimit,
    ShowRound,
    StopJob,
)
from everstep.subjects import CLUSTER
from everstep_services.history.operator_requests import (
    NoSuchJobError,
    OperatorRequest,
    RequestError,
    RequestRefusedError,
    ServiceUnavailableError,
    Verb,
    ask,
    carry_out,
    similar_names,
)
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.unit.rendezvous.documents import round_document


class Rendezvous:
    """Gives the answers that a test has set, and remembers the questions."""

    def __init__(self, answer: Done | RefusalError) -> None:
        self.answer = answer
        self.asked: list[Message] = []

    async def __call__(self, question: Message) -> Message:
        self.asked.append(question)
        if isinstance(question, ShowRound):
            return round_document("j", seats=1, name_characters=8)
        if isinstance(self.answer, RefusalError):
            raise self.answer
        return self.answer

    @property
    def handlers(self) -> dict[str, Handler]:
        return dict.fromkeys(("show", "stop", "restart", "save", "drain", "evidence"), self)


async def done(deed: OperatorRequest, rendezvous: Rendezvous) -> str:
    bus = MemoryBus(MemoryServer())
    async with bus.answer("rendezvous", rendezvous.handlers):
        return await carry_out(bus, deed)


def deed(verb: Verb, **details: object) -> OperatorRequest:
    return OperatorRequest(verb, "j", "ann", "enough", "cli", details)


async def test_who_and_why_reach_rendezvous_with_the_question() -> None:
    rendezvous = Rendezvous(Done(text="round 3 ends"))
    assert await done(deed("stop", save_first=False), rendezvous) == "round 3 ends"
    assert await done(deed("drain", node="n1", within_s=None), rendezvous) == "round 3 ends"
    assert rendezvous.asked == [
        StopJob(job="j", by="ann", reason="enough", save_first=False, origin="cli"),
        DrainNode(job="j", by="ann", reason="enough", node="n1", origin="cli"),
    ]


@pytest.mark.parametrize(("meant", "round_"), [(None, 3), (2, 2)])
async def test_a_restart_means_one_round(meant: int | None, round_: int) -> None:
    rendezvous = Rendezvous(Done())
    await done(deed("restart", round=meant), rendezvous)
    question = RestartJob(job="j", by="ann", reason="enough", round=round_, origin="cli")
    assert rendezvous.asked[-1] == question


@pytest.mark.parametrize(
    ("answer", "error", "said"),
    [
        (Done(text="it is over", is_refused=True), RequestRefusedError, "it is over"),
        (RefusalError("404", "there is no job j: join it first"), NoSuchJobError,
         "there is no job j"),
        (RefusalError("503", "nothing could be written down; ask again"), ServiceUnavailableError,
         "rendezvous cannot do it now: nothing could be written down; ask again"),
    ],
)  # fmt: skip
async def test_each_no_has_its_error(
    answer: Done | RefusalError, error: type[RequestError], said: str
) -> None:
    with pytest.raises(error) as caught:
        await done(deed("stop"), Rendezvous(answer))
    assert str(caught.value) == said


async def test_nobody_answers_without_rendezvous_or_without_the_bus() -> None:
    server = MemoryServer()
    bus = MemoryBus(server)
    with pytest.raises(
        ServiceUnavailableError, match=r"cannot be asked: nobody answers rendezvous\.stop"
    ):
        await carry_out(bus, deed("stop"))
    await server.set_up(up=False)
    with pytest.raises(ServiceUnavailableError, match="cannot be asked: no connection"):
        await carry_out(bus, deed("stop"))


async def test_an_answer_that_does_not_come_may_mean_that_it_was_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ask, "__kwdefaults__", {"within_s": 0.01})
    bus = MemoryBus(MemoryServer())

    async def never(_: Message) -> Message:
        await asyncio.Event().wait()
        raise AssertionError

    async with bus.answer("rendezvous", {"stop": never}):
        with pytest.raises(
            ServiceUnavailableError, match="see everstep job show j before you ask again"
        ):
            await carry_out(bus, deed("stop"))


async def test_health_is_asked_what_is_healths() -> None:
    health = Rendezvous(Done(text="it is done"))
    bus = MemoryBus(MemoryServer())
    about: dict[Verb, dict[str, object]] = {
        "exclude": {"node": "n1", "ttl_s": None},
        "include": {"node": "n1"},
        "set_limit": {"section": "data", "limit_s": 30.0},
        "control": {"changes": {"brake": "on"}},
    }
    async with bus.answer("health", dict.fromkeys(about, health)):
        for verb, details in about.items():
            job = "j" if verb == "set_limit" else CLUSTER
            asked = OperatorRequest(verb, job, "ann", "enough", "cli", details)
            assert await carry_out(bus, asked) == "it is done"
    who: dict[str, Any] = {"by": "ann", "reason": "enough", "origin": "cli"}
    limit = SectionLimit(section="data", limit_s=30.0, source="configured")
    assert health.asked == [
        ExcludeNode(job=CLUSTER, node="n1", **who),
        IncludeNode(job=CLUSTER, node="n1", **who),
        SetLimit(job="j", limit=limit, **who),
        SetControl(job=CLUSTER, changes={"brake": "on"}, **who),
    ]


async def test_what_health_cannot_take_is_refused_in_its_words() -> None:
    health = Rendezvous(RefusalError("422", "n1 is not a node"))
    bus = MemoryBus(MemoryServer())
    async with bus.answer("health", {"include": health}):
        with pytest.raises(RequestRefusedError, match="^n1 is not a node$"):
            await carry_out(
                bus, OperatorRequest("include", CLUSTER, "ann", "", "cli", {"node": "n1"})
            )


def test_a_name_that_was_mistyped_is_found() -> None:
    known = ["llama-8b", "llama-70b", "vit"]
    assert similar_names("llama-8c", known) == "; did you mean llama-8b or llama-70b?"
    assert similar_names("zzz", known) == similar_names("zzz", []) == "; see everstep jobs"


def test_a_name_that_is_on_record_is_never_offered_in_its_own_place() -> None:
    known = ["fill", "fills", "train"]
    assert similar_names("fil", known) == "; did you mean fill or fills?"
    on_record = similar_names("fill", known)
    assert on_record.startswith(", only a record of one: it is over, or another launcher runs it")
    assert on_record.endswith("; see everstep job show fill")
    assert similar_names("zzz", known) == "; see everstep jobs"


async def test_a_capture_has_an_id_of_its_own_and_is_asked_of_rendezvous() -> None:
    rendezvous = Rendezvous(Done(text="asked 1 node"))
    details = {"capture": None, "evidence": (), "ranks": (3,), "within_s": 5.0}
    assert await done(OperatorRequest("capture", "j", "ann", "slow", "cli", details), rendezvous)
    (question,) = rendezvous.asked
    assert isinstance(question, RequestEvidence)
    assert (question.round, question.ranks, question.origin) == (0, (3,), "cli")
    assert question.incident.startswith("capture-")
