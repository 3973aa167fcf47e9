"""What scripts ask for, handed on to a rendezvous that is a function, by a bus in memory."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Literal

import pytest

from everstep.bus.background import in_background
from everstep.bus.requests import RefusalError
from everstep.messages import Done, DrainNode, Message, RestartJob, StopJob
from everstep_services.agent.rendezvous_client import script_requests
from everstep_services.agent.rendezvous_client.script_requests import ScriptRequests
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.fakes.clock import NotedClock
from tests.unit.agent.run_plans import plan
from tests.waiting import until_async
from trainer_sdk.wire import Requested


class Script:
    """An agent's requests, and a rendezvous that answers them one after the other."""

    def __init__(self, home: Path, *answers: Done | RefusalError) -> None:
        self.server = MemoryServer()
        self.bus = MemoryBus(self.server)
        self.asked: list[Message] = []
        self.said: list[tuple[str, bool]] = []
        self._answers = list(answers)
        words = ("--node-id", "n7", "--name", "j", "--preempt-grace", "60", "train.py")
        self.requests = ScriptRequests(plan(home, *words), self.bus, NotedClock(0.0), self._say)

    def wants(
        self, kind: Literal["exclude", "restart", "stop"], *, round: int = 1, rank: int = 3
    ) -> None:
        self.requests.hear(Requested(round=round, rank=rank, kind=kind, reason="too hot"))

    async def until_answered(self) -> None:
        await until_async(lambda: not self._answers, "all of it is answered")
        await until_async(lambda: self.said[-1][0].startswith("rendezvous "), "it is logged")

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        handlers = dict.fromkeys(("drain", "restart", "stop"), self._answer)
        async with (
            self.bus.answer("rendezvous", handlers),
            in_background(self.requests.ask_for_ever()),
        ):
            yield

    async def _answer(self, question: Message) -> Message:
        self.asked.append(question)
        answer = self._answers.pop(0)
        if isinstance(answer, RefusalError):
            raise answer
        return answer

    def _say(self, text: str, *, is_warning: bool = False) -> None:
        self.said.append((text, is_warning))


@pytest.mark.parametrize("kind", ["exclude", "restart", "stop"])
async def test_rendezvous_is_asked_in_the_name_of_the_rank(
    tmp_path: Path, kind: Literal["exclude", "restart", "stop"]
) -> None:
    script = Script(tmp_path, Done(text="round 1 ends"))
    async with script.asking():
        script.wants(kind)
        await script.until_answered()
    [question] = script.asked
    assert isinstance(question, DrainNode | RestartJob | StopJob)
    assert (question.by, question.reason, question.origin) == ("rank 3 of n7", "too hot", "script")
    if isinstance(question, DrainNode):
        assert (question.node, question.within_s) == ("n7", 60.0)
    if isinstance(question, RestartJob):
        assert (question.round, question.without_nodes) == (1, ())
    wish = {
        "exclude": "n7 be excluded",
        "restart": "the ranks be restarted",
        "stop": "the job be stopped",
    }
    assert script.said == [
        (f"rank 3 asks that {wish[kind]}: too hot", False),
        ("rendezvous does what rank 3 of n7 asks for: round 1 ends", False),
    ]


async def test_a_node_with_wrong_results_leaves_without_a_save(tmp_path: Path) -> None:
    script = Script(tmp_path, Done(text="round 1 ends"))
    async with script.asking():
        request = Requested(round=1, rank=3, kind="exclude", reason="r", origin="numerics")
        script.requests.hear(request)
        await script.until_answered()
    [question] = script.asked
    assert isinstance(question, DrainNode)
    assert (question.origin, question.within_s) == ("numerics", None)


async def test_a_refusal_is_one_line(tmp_path: Path) -> None:
    script = Script(tmp_path, Done(text="the job is over already: done", is_refused=True))
    async with script.asking():
        script.wants("stop")
        await script.until_answered()
    assert script.said[1:] == [
        ("rendezvous does not do what rank 3 of n7 asks for: the job is over already: done", True)
    ]


async def test_an_agent_that_leaves_still_shows_the_answer(tmp_path: Path) -> None:
    """The order to leave may overtake the answer to the request that it follows from."""
    script = Script(tmp_path, Done(text="round 1 ends"))
    async with script.asking():
        script.wants("stop")
        await script.requests.finish()
        assert [text for text, _ in script.said[1:]] == [
            "rendezvous does what rank 3 of n7 asks for: round 1 ends"
        ]
        await script.requests.finish()


async def test_an_agent_leaves_without_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_requests, "_LAST_WITHIN_S", 0.0)
    script = Script(tmp_path)
    script.wants("stop")
    await script.requests.finish()
    assert len(script.said) == 1


async def test_the_same_wish_of_other_ranks_is_asked_once_a_round(tmp_path: Path) -> None:
    script = Script(tmp_path, Done(text="no", is_refused=True), Done(text="yes"))
    async with script.asking():
        for rank in range(8):
            script.wants("stop", rank=rank)
        await until_async(lambda: len(script.asked) == 1, "it is asked")
        script.wants("stop", round=2, rank=5)
        await script.until_answered()
    assert [one.by for one in script.asked if isinstance(one, StopJob)] == [
        "rank 0 of n7",
        "rank 5 of n7",
    ]


async def test_a_rendezvous_that_cannot_answer_now_is_asked_again(tmp_path: Path) -> None:
    script = Script(tmp_path, RefusalError("503", "nothing was written"), Done(text="yes"))
    await script.server.set_up(False)
    async with script.asking():
        script.wants("exclude")
        await script.server.set_up(True)
        await script.until_answered()
    assert len(script.asked) == 2
    assert script.asked[0] == script.asked[1]
    assert len(script.said) == 2
