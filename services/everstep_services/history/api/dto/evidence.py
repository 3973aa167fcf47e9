"""What evidence says, as REST shows it: how far ranks were in collectives, and where they stood."""

from pydantic import Field

from everstep_services.history.api.dto.answer import Answer


class SuspectOut(Answer):
    """A rank that others wait for."""

    rank: int
    reason: str


class CollectiveFaultOut(Answer):
    """A fault in collectives, and the ranks that may have caused it."""

    kind: str
    """`never_joined`, `no_dump`, `mismatch`, `not_started`, `half_completed`, `stuck` or
    `cycle`."""
    summary: str = Field(description="The fault in a sentence.")
    confidence: float = Field(description="0 to 1.")
    suspects: list[SuspectOut] = Field(description="At most 64.")
    waiting: list[int]
    """Ranks that wait because of this fault, directly or through others."""


class CollectiveOut(Answer):
    """A collective that is not over, and how far each rank is."""

    group: str = Field(description="The process group.")
    sequence: int = Field(description="The number of the collective in that group.")
    operation: str = Field(examples=["all_reduce of 4 Float"])
    where: str
    """The line of the script that waits there; empty if no stack shows it."""
    age_s: float | None = Field(description="How long ago the last rank joined the collective.")
    never_joined: list[int] = Field(description="Ranks that have not called it.")
    no_dump: list[int] = Field(description="Ranks without a flight recorder.")
    scheduled: list[int]
    """Ranks that have called it, and whose devices have not started it."""
    started: list[int] = Field(description="Ranks whose devices have started it.")
    completed: list[int] = Field(description="Ranks that have completed it.")


class Collectives(Answer):
    """What the flight recorders of an incident say together."""

    job: str
    incident: str
    verdict: str = Field(description="`culprits`, `inconclusive` or `nothing_pending`.")
    summary: str = Field(description="All findings in a sentence.")
    ranks: int = Field(description="How many ranks the job has, as far as it is known.")
    dumps: int = Field(description="The number of ranks with a recorder.")
    faults: list[CollectiveFaultOut]
    """The faults, the most certain first; at most 16."""
    collectives: list[CollectiveOut]
    """Collectives that are not over, the oldest first; at most 64."""
    without_dump: list[int] = Field(description="Ranks that others know of, without a recorder.")
    notes: list[str] = Field(description="What could not be read, and why; at most 64.")
    is_cut: bool = Field(description="True if there are more than one answer can hold.")


class FoldedStackOut(Answer):
    """A stack, and the ranks in which a thread has exactly this stack."""

    ranks: list[int]
    thread: str = Field(examples=["MainThread"])
    does: str = Field(examples=["waits in a collective (all_reduce)"])
    """What the thread does there."""
    frames: list[str] = Field(description="The innermost one first; at most 64.")


class Stacks(Answer):
    """What all stacks of an incident show together."""

    job: str
    incident: str
    verdict: str = Field(description="`odd_ranks`, `inconclusive` or `nothing`.")
    summary: str = Field(description="All findings in a sentence.")
    confidence: float = Field(description="0 to 1.")
    ranks: int = Field(description="The number of ranks with a stack.")
    suspects: list[SuspectOut]
    """Ranks whose stacks differ from those of the waiting ranks; at most 64."""
    waiting: list[int] = Field(description="Ranks that wait for others.")
    stacks: list[FoldedStackOut]
    """Main threads, the largest group first, then other threads that are not idle; at most 64."""
    missing: list[int] = Field(description="Ranks without any stack.")
    notes: list[str] = Field(description="What could not be read, and why; at most 64.")
    is_cut: bool = Field(description="True if there are more than one answer can hold.")
