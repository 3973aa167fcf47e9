"""Requests of policies: asked again while no service answers, and in an order that is safe."""

from everstep.bus.policy_requests import PolicyRequests
from everstep.bus.ports import Handler
from everstep.bus.requests import RefusalError
from everstep.messages import Done, DrainNode, ExcludeNode, Message, StopJob
from everstep.subjects import CLUSTER
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.fakes.clock import FakeClock, NotedClock


class Service:
    """Gives the answers that a test has set, one after the other, and remembers the questions."""

    def __init__(self, *answers: Done | RefusalError) -> None:
        self.answers = list(answers)
        self.asked: list[Message] = []

    async def __call__(self, question: Message) -> Message:
        self.asked.append(question)
        answer = self.answers.pop(0)
        if isinstance(answer, RefusalError):
            raise answer
        return answer

    def handlers(self, *verbs: str) -> dict[str, Handler]:
        return dict.fromkeys(verbs, self)


async def test_a_node_is_excluded_before_it_is_drained() -> None:
    """Otherwise it would come back as its own spare (A6.1)."""
    bus = MemoryBus(MemoryServer())
    health, rendezvous = Service(Done(text="excluded")), Service(Done(text="drained"))
    requests = PolicyRequests(bus, FakeClock(), "attribution")
    async with (
        bus.answer("health", health.handlers("exclude")),
        bus.answer("rendezvous", rendezvous.handlers("drain")),
    ):
        done = await requests.replace("j", "n1", "it failed twice", drain_within_s=9.0)
    assert done == Done(text="excluded; drained")
    (out,), (drain,) = health.asked, rendezvous.asked
    assert isinstance(out, ExcludeNode)
    assert (out.job, out.node, out.reason) == (CLUSTER, "n1", "j: it failed twice")
    assert isinstance(drain, DrainNode)
    assert (drain.job, drain.within_s, drain.by) == ("j", 9.0, "attribution")


async def test_a_node_that_is_not_excluded_is_not_drained() -> None:
    bus = MemoryBus(MemoryServer())
    refused = Done(text="the breaker is open", is_refused=True)
    health, rendezvous = Service(refused), Service()
    requests = PolicyRequests(bus, FakeClock(), "attribution")
    async with (
        bus.answer("health", health.handlers("exclude")),
        bus.answer("rendezvous", rendezvous.handlers("drain")),
    ):
        assert await requests.replace("j", "n1", "it failed twice") == refused
    assert rendezvous.asked == []


async def test_a_refusal_is_an_answer_and_silence_is_not() -> None:
    """A service that does not answer is asked three times; a service that refuses, once."""
    bus = MemoryBus(MemoryServer())
    clock = NotedClock(most_s=0)
    requests = PolicyRequests(bus, clock, "straggler")
    rendezvous = Service(RefusalError("404", "there is no job j"))
    async with bus.answer("rendezvous", rendezvous.handlers("stop")):
        done = await requests.answered("j", lambda: requests.stop("j", "too slow"))
    assert done.is_refused
    assert "there is no job j" in done.text
    (stop,) = rendezvous.asked
    assert isinstance(stop, StopJob)
    attempts = 0

    async def silence() -> Done:
        nonlocal attempts
        attempts += 1
        raise TimeoutError("no answer within 4 s")

    done = await requests.answered("j", silence)
    assert (attempts, done.is_refused) == (3, True)
    assert clock.waits == [1.0, 1.0, 1.0]
    assert done.text == "nobody answered: no answer within 4 s"
