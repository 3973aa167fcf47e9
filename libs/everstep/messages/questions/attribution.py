"""Questions to attribution: about evidence, and to record a correction."""

from everstep.messages.base import Count, Int, Name, Part, Question, Reply
from everstep.messages.documents.cases import EvidencePiece


class CorrectVerdict(Question, frozen=True, kw_only=True, tag="correct_verdict.v1"):
    """A person knows what caused this incident. The answer is a `Done`."""

    incident: Name
    """The incident."""
    by: Name
    """The person, as authenticated."""
    cause: Name
    """The cause class that is right, as in `verdict_reached`."""
    reason: str
    """Why, in their words."""
    culprit_ranks: tuple[Int, ...] = ()
    """The ranks that caused it."""
    culprit_nodes: tuple[Name, ...] = ()
    """The nodes that caused it."""
    origin: Name = ""
    """The interface: `rest` or `cli`."""


class ReadEvidence(Question, frozen=True, kw_only=True, tag="read_evidence.v1"):
    """What do these pieces say together? History asks attribution, on behalf of a person.

    Asked as `collectives` of flight recorders, as `stacks` of stacks.
    """

    evidence: tuple[EvidencePiece, ...]
    """All of one kind and one incident."""
    world_size: Count = 0
    """How many ranks the job had; 0 if unknown."""


class Suspicion(Part, frozen=True, kw_only=True):
    """A rank that others wait for."""

    rank: Count
    """The rank."""
    reason: str
    """Why it."""


class CollectiveFault(Part, frozen=True, kw_only=True):
    """One thing that is wrong with collectives, and the ranks that may have caused it."""

    kind: str
    """`never_joined`, `no_dump`, `mismatch`, `not_started`, `half_completed`, `stuck` or
    `cycle`."""
    summary: str
    """What it is, in a sentence."""
    confidence: float
    """0 to 1."""
    suspects: tuple[Suspicion, ...] = ()
    """The ranks that may have caused it, at most 64."""
    waiting: tuple[Count, ...] = ()
    """The ranks that wait for it, directly or through others."""


class OpenCollective(Part, frozen=True, kw_only=True):
    """A collective of one group that is not over."""

    group: str
    """The process group."""
    sequence: Int
    """Its number in that group."""
    operation: str
    """`all_reduce of 4 Float` …"""
    where: str = ""
    """The line of a script that waits there, where a recorder has stacks."""
    age_s: float | None = None
    """How long ago the last rank came to it."""
    never_joined: tuple[Count, ...] = ()
    """Ranks that have not called it."""
    no_dump: tuple[Count, ...] = ()
    """Ranks without a flight recorder."""
    scheduled: tuple[Count, ...] = ()
    """Ranks that have called it, and whose device has not begun."""
    started: tuple[Count, ...] = ()
    """Ranks that are in it."""
    completed: tuple[Count, ...] = ()
    """Ranks that are through."""


class CollectivesRead(Reply, frozen=True, kw_only=True, tag="collectives_read.v1"):
    """How far each rank was in its collectives."""

    verdict: str
    """`culprits`, `inconclusive` or `nothing_pending`."""
    summary: str
    """All of it in a sentence."""
    ranks: Count
    """How many ranks the job has, as far as it is known."""
    dumps: Count
    """How many ranks have a recorder."""
    faults: tuple[CollectiveFault, ...] = ()
    """What is wrong, the surest first."""
    collectives: tuple[OpenCollective, ...] = ()
    """Those that are not over, the oldest first, at most 64."""
    without_dump: tuple[Count, ...] = ()
    """Ranks that other recorders name, and that have none themselves."""
    notes: tuple[str, ...] = ()
    """What could not be read, and why."""
    is_cut: bool = False
    """Not all faults and collectives are here: there are too many for one answer."""


class FoldedStack(Part, frozen=True, kw_only=True):
    """Ranks in which a thread has one and the same stack."""

    ranks: tuple[Count, ...]
    """The ranks."""
    thread: str
    """The thread's name; `MainThread` for the main one."""
    does: str
    """What it does there: `waits in a collective (all_reduce)`."""
    frames: tuple[str, ...]
    """The innermost one first, at most 64."""


class StacksRead(Reply, frozen=True, kw_only=True, tag="stacks_read.v1"):
    """Where the ranks stood, equal stacks folded."""

    verdict: str
    """`odd_ranks`, `inconclusive` or `nothing`."""
    summary: str
    """All of it in a sentence."""
    confidence: float
    """0 to 1."""
    ranks: Count
    """The number of ranks with a stack."""
    suspects: tuple[Suspicion, ...] = ()
    """Ranks that stand elsewhere than those that wait, at most 64."""
    waiting: tuple[Count, ...] = ()
    """Ranks that wait for others."""
    stacks: tuple[FoldedStack, ...] = ()
    """Of main threads, the largest group first; then those of other threads that are not idle."""
    missing: tuple[Count, ...] = ()
    """Ranks without any stack."""
    notes: tuple[str, ...] = ()
    """What could not be read, and why."""
    is_cut: bool = False
    """Not all stacks are here: there are too many for one answer."""
