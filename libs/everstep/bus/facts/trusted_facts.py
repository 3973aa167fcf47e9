"""Which facts are trusted: those whose nodes take part in the job, as rendezvous records it.

A job's login may name any node in a fact. A fact that affects other jobs is trusted only about
nodes that rendezvous has given a seat (a place in the round) in that job, now or earlier
(`RoundDocument.nodes`). Facts of a job that rendezvous does not know, such as a job of another
launcher, are not trusted. The document of a job is kept after the job has ended.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from everstep.bus.input_failures import InputFailures
from everstep.bus.ports import Bus
from everstep.bus.topology import ROUNDS
from everstep.clock import Clock
from everstep.messages import Fact, RoundDocument
from everstep.messages.codec import BadMessageError, decode_as

_AGAIN_AFTER_S = 1.0
_WAIT_S = 30.0
_WAITING_MOST = 1000
_OF_A_JOB_MOST = 100
_JOBS_MOST = 1000


class RoundDocuments:
    """Reads the document that rendezvous keeps about each job."""

    def __init__(self, bus: Bus) -> None:
        self._documents = bus.documents(ROUNDS)
        self._input_failures = InputFailures("the documents of rounds")

    async def read(self, job: str) -> RoundDocument | None:
        """Return the newest document; None where there is none, or it cannot be read."""
        document = await self._documents.get(job)
        try:
            return None if document.data is None else decode_as(document.data, RoundDocument)
        except BadMessageError as error:
            self._input_failures.note(f"the round of {job}", error)
            return None


class TrustedFacts:
    """Passes facts whose nodes have, or had, a seat in the job, or were refused one.

    An agent examines its node before it joins, so a fact about an unknown node waits for 30 s, and
    later facts about that node wait behind it. They wait in memory: a replica that takes over does
    not have them.
    """

    def __init__(self, bus: Bus, clock: Clock, accused: Callable[[Fact], Sequence[str]]) -> None:
        self._rounds = RoundDocuments(bus)
        self._clock = clock
        self._accused = accused
        self._seated: dict[str, tuple[float, frozenset[str]]] = {}
        """By job: when its document was read, and the nodes in it."""
        self._waiting: dict[str, tuple[float, Fact]] = {}
        self.refused = 0
        """The number of facts that were not trusted."""

    async def passed(self, facts: Iterable[Fact] = ()) -> list[Fact]:
        """Return the trusted facts among these and the waiting ones, the oldest first."""
        now = self._clock.now()
        queue = dict(self._waiting)
        for fact in facts:
            queue.setdefault(fact.id, (now, fact))
        trusted: list[Fact] = []
        waiting: dict[str, tuple[float, Fact]] = {}
        of_job: Counter[str] = Counter()
        for key, (since, fact) in queue.items():
            if await self._is_trusted(fact, now):
                trusted.append(fact)
                continue
            of_job[fact.job] += 1
            is_room = len(waiting) < _WAITING_MOST and of_job[fact.job] <= _OF_A_JOB_MOST
            if is_room and now - since < _WAIT_S:
                waiting[key] = since, fact
        self.refused += len(queue) - len(trusted) - len(waiting)
        self._waiting = waiting
        return trusted

    async def _is_trusted(self, fact: Fact, now: float) -> bool:
        nodes = frozenset(self._accused(fact))
        return not nodes or nodes <= await self._nodes(fact.job, nodes, now)

    async def _nodes(self, job: str, nodes: frozenset[str], now: float) -> frozenset[str]:
        """Return a job's nodes; if `nodes` are not all among them, read the document again."""
        read_at, seated = self._seated.pop(job, (-_AGAIN_AFTER_S, frozenset[str]()))
        if not nodes <= seated and now - read_at >= _AGAIN_AFTER_S:
            document = await self._rounds.read(job)
            read_at, seated = now, frozenset[str]() if document is None else _asked_in(document)
        self._seated[job] = read_at, seated
        while len(self._seated) > _JOBS_MOST:
            del self._seated[next(iter(self._seated))]
        return seated


def _asked_in(document: RoundDocument) -> frozenset[str]:
    """Return the nodes with a seat, now or earlier, and those that rendezvous refused."""
    refused = (entry.rpartition(" ")[0] for entry in document.refused)
    return document.nodes.union(refused)
