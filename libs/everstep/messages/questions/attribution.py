"""What attribution may be asked: for a verdict, and to take a correction down."""

from everstep.messages.base import Int, Name, Question


class Explain(Question, frozen=True, kw_only=True, tag="explain.v1"):
    """Who caused this incident? Anyone asks attribution. The answer is a `VerdictReached`."""

    incident: Name
    """The incident."""
    again: bool = False
    """Analyze once more, with what has come since."""


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
    """By which way: `rest` or `cli`."""
