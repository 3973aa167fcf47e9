"""Replies that any service may give."""

from everstep.messages.base import Reply


class Done(Reply, frozen=True, kw_only=True, tag="done.v1"):
    """It was done, was done already, or was refused. Asking again is harmless."""

    text: str = ""
    """What happened and will happen, or why not, for the person who asked."""
    is_refused: bool = False
    """Nothing was done: the state of things does not allow it."""
