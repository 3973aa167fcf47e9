"""What attribution may be asked; it answers with a verdict."""

from everstep.messages.base import Name, Question


class Explain(Question, frozen=True, kw_only=True, tag="explain.v1"):
    """Who caused this incident? Anyone asks attribution. The answer is a `VerdictReached`."""

    incident: Name
    """The incident."""
    again: bool = False
    """Analyze once more, with what has come since."""
