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
    """Why, in the person's words."""
    culprit_ranks: tuple[Int, ...] = ()
    """The ranks that caused the incident."""
    culprit_nodes: tuple[Name, ...] = ()
    """The nodes that caused the incident."""
    origin: Name = ""
    """The interface: `rest` or `cli`."""


class ReadEvidence(Question, frozen=True, kw_only=True, tag="read_evidence.v1"):
    """What do these pieces show together? History asks attribution, on behalf of a person.

    The verb is `collectives` for flight recorders, and `stacks` for stacks.
    """

    evidence: tuple[EvidencePiece, ...]
    """Pieces of one kind and of one incident."""
    world_size: Count = 0
    """How many ranks the job had; 0 if unknown."""
    ended: tuple[Count, ...] = ()
    """The ranks that had failed by themselves before the evidence was collected."""


class Suspicion(Part, frozen=True, kw_only=True):
    """A rank that others wait for."""

    rank: Count
    """The rank."""
    reason: str
    """Why this rank is suspected."""


class CollectiveFault(Part, frozen=True, kw_only=True):
    """One fault of collectives, and the ranks that may have caused it."""

    kind: str
    """`never_joined`, `no_dump`, `mismatch`, `not_started`, `half_completed`, `stuck` or
    `cycle`."""
    summary: str
    """The fault in a sentence."""
    confidence: float
    """0 to 1."""
    suspects: tuple[Suspicion, ...] = ()
    """The ranks that may have caused the fault, at most 64."""
    waiting: tuple[Count, ...] = ()
    """The ranks that wait because of the fault, directly or through others."""


class OpenCollective(Part, frozen=True, kw_only=True):
    """A collective of one group that has not ended on all ranks."""

    group: str
    """The process group."""
    sequence: Int
    """The number of the collective in its group."""
    operation: str
    """`all_reduce of 4 Float` …"""
    where: str = ""
    """The line of a script that waits in the collective, where a recorder has stacks."""
    age_s: float | None = None
    """How long ago the last rank reached the collective."""
    never_joined: tuple[Count, ...] = ()
    """Ranks that have not called the collective."""
    no_dump: tuple[Count, ...] = ()
    """Ranks without a flight recorder."""
    scheduled: tuple[Count, ...] = ()
    """Ranks that have called the collective, but whose device has not begun it."""
    started: tuple[Count, ...] = ()
    """Ranks that are in the collective."""
    completed: tuple[Count, ...] = ()
    """Ranks that have finished the collective."""


class CollectivesRead(Reply, frozen=True, kw_only=True, tag="collectives_read.v1"):
    """How far each rank was in its collectives."""

    verdict: str
    """`culprits`, `inconclusive` or `nothing_pending`."""
    summary: str
    """The result in a sentence."""
    ranks: Count
    """How many ranks the job has, as far as it is known."""
    dumps: Count
    """How many ranks have a recorder."""
    faults: tuple[CollectiveFault, ...] = ()
    """The faults, the most certain first."""
    collectives: tuple[OpenCollective, ...] = ()
    """The collectives that have not ended, the oldest first, at most 64."""
    without_dump: tuple[Count, ...] = ()
    """Ranks that other recorders name, but that have no recorder themselves."""
    notes: tuple[str, ...] = ()
    """What could not be read, and why."""
    is_cut: bool = False
    """Not all faults and collectives are here: there are too many for one answer."""


class FoldedStack(Part, frozen=True, kw_only=True):
    """Ranks in which a thread has the same stack."""

    ranks: tuple[Count, ...]
    """The ranks."""
    thread: str
    """The thread's name; `MainThread` for the main one."""
    does: str
    """What the thread does there: `waits in a collective (all_reduce)`."""
    frames: tuple[str, ...]
    """The frames, the innermost first, at most 64."""


class StacksRead(Reply, frozen=True, kw_only=True, tag="stacks_read.v1"):
    """Where the threads of the ranks stood; equal stacks are folded."""

    verdict: str
    """`odd_ranks`, `inconclusive` or `nothing`."""
    summary: str
    """The result in a sentence."""
    confidence: float
    """0 to 1."""
    ranks: Count
    """The number of ranks with a stack."""
    suspects: tuple[Suspicion, ...] = ()
    """Ranks that stand elsewhere than the waiting ranks, at most 64."""
    waiting: tuple[Count, ...] = ()
    """Ranks that wait for others."""
    stacks: tuple[FoldedStack, ...] = ()
    """The stacks of main threads, the largest group first; then those of other threads that are not
    idle."""
    missing: tuple[Count, ...] = ()
    """Ranks without any stack."""
    notes: tuple[str, ...] = ()
    """What could not be read, and why."""
    is_cut: bool = False
    """Not all stacks are here: there are too many for one answer."""
