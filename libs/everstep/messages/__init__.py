"""Every message that crosses a process, and nothing else."""

from everstep.messages.base import Fact, Message, kind_of, tag_of

__all__ = ["Fact", "Message", "kind_of", "tag_of"]
