"""Replies that any service may give."""

from everstep.messages.base import Reply


class Done(Reply, frozen=True, kw_only=True, tag="done.v1"):
    """The request was carried out, had been carried out before, or was refused.

    Asking again is harmless.
    """

    text: str = ""
    """What happened and will happen, or why the request was refused, for the person who asked."""
    is_refused: bool = False
    """Nothing was done: the present state does not allow it."""
