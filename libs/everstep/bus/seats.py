"""Whether a node takes part in a job, as rendezvous has written it down.

A job's login may name any node in a fact. What is to hold for all jobs is believed only of nodes
that rendezvous has given a seat in that job, now or earlier (`RoundDocument.nodes`), and of none
where rendezvous does not know the job, as one of another launcher. The document of a job stays when
the job is over.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from everstep.bus.containment import Containment
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
    """What rendezvous has written about each job."""

    def __init__(self, bus: Bus) -> None:
        self._documents = bus.documents(ROUNDS)
        self._contained = Containment("the documents of rounds")

    async def read(self, job: str) -> RoundDocument | None:
        """The newest; None where there is none, or none that can be read."""
        found = await self._documents.get(job)
        try:
            return None if found.data is None else decode_as(found.data, RoundDocument)
        except BadMessageError as error:
            self._contained.note(f"the round of {job}", error)
            return None


class SeatedOnly:
    """Lets facts pass whose nodes have, or had, a seat in the job, or were refused one.

    An agent examines its node before it joins: a fact that cannot be believed yet waits for 30 s,
    and those about the same node behind it. They wait in memory: a replica that takes over does
    without them.
    """

    def __init__(self, bus: Bus, clock: Clock, accused: Callable[[Fact], Sequence[str]]) -> None:
        self._rounds = RoundDocuments(bus)
        self._clock = clock
        self._accused = accused
        self._seated: dict[str, tuple[float, frozenset[str]]] = {}
        """By job: when it was read, and which nodes were there."""
        self._waiting: dict[str, tuple[float, Fact]] = {}
        self.refused = 0
        """Facts that were not believed in the end."""

    async def passed(self, facts: Iterable[Fact] = ()) -> list[Fact]:
        """Of these, and of those that wait, the ones to be believed, the oldest first."""
        now = self._clock.now()
        queue = dict(self._waiting)
        for one in facts:
            queue.setdefault(one.id, (now, one))
        believed: list[Fact] = []
        waiting: dict[str, tuple[float, Fact]] = {}
        of_job: Counter[str] = Counter()
        for key, (since, fact) in queue.items():
            if await self._is_believed(fact, now):
                believed.append(fact)
                continue
            of_job[fact.job] += 1
            is_room = len(waiting) < _WAITING_MOST and of_job[fact.job] <= _OF_A_JOB_MOST
            if is_room and now - since < _WAIT_S:
                waiting[key] = since, fact
        self.refused += len(queue) - len(believed) - len(waiting)
        self._waiting = waiting
        return believed

    async def _is_believed(self, fact: Fact, now: float) -> bool:
        nodes = frozenset(self._accused(fact))
        return not nodes or nodes <= await self._nodes(fact.job, nodes, now)

    async def _nodes(self, job: str, nodes: frozenset[str], now: float) -> frozenset[str]:
        """Those of a job; read again, though not all the time, where these are not among them."""
        read_at, known = self._seated.pop(job, (-_AGAIN_AFTER_S, frozenset[str]()))
        if not nodes <= known and now - read_at >= _AGAIN_AFTER_S:
            document = await self._rounds.read(job)
            read_at, known = now, frozenset[str]() if document is None else _asked_in(document)
        self._seated[job] = read_at, known
        while len(self._seated) > _JOBS_MOST:
            del self._seated[next(iter(self._seated))]
        return known


def _asked_in(document: RoundDocument) -> frozenset[str]:
    """Nodes with a seat, now or earlier, and those that rendezvous has not let in."""
    refused = (entry.rpartition(" ")[0] for entry in document.refused)
    return document.nodes.union(refused)
