"""nats-py's parser, with a short way for plain messages.

Health hears a beat a second of every node. nats-py copies each message twice, matches it with up to
seven patterns, and awaits what becomes of it: half of what hearing a beat cost was that. Here a
plain message that has arrived whole is heard where it lies; all else goes nats-py's way, in order.
"""

import re
from collections.abc import Callable
from typing import Protocol

from nats.protocol.parser import AWAITING_CONTROL_LINE, CRLF_SIZE, Parser

Hear = Callable[[str, bytes], object]
"""Takes in the subject and the body of a message, at once."""

_PLAIN = re.compile(rb"MSG (\S+) (\d+) (\d+)\r\n")


class Hearing(Protocol):
    """What the parser needs of its client."""

    def hear_of(self, sid: int) -> Hear | None:
        """Who hears the plain messages of a subscription at once, if anybody may just now."""
        ...

    async def hear_failed(self, error: Exception) -> None: ...


class FrameParser(Parser):
    """One for each client; its `parse` takes what was read, whatever it was cut into."""

    def __init__(self, client: Hearing) -> None:
        super().__init__(client)
        self._client = client

    async def parse(self, data: bytes = b"") -> None:
        """Hear what is plain and whole; give nats-py one line, or one body, of all else."""
        at, buffer = 0, self.buf
        while at < len(data) and self.buf is buffer:  # nats-py has a new one on a new connection
            begins = not buffer and self.state == AWAITING_CONTROL_LINE
            plain = _PLAIN.match(data, at) if begins else None
            if plain is not None:
                subject, sid, size = plain.groups()
                end = plain.end() + int(size)
                hear = self._client.hear_of(int(sid))
                if hear is not None and end + CRLF_SIZE <= len(data):
                    try:
                        hear(subject.decode(), data[plain.end() : end])
                    except Exception as error:  # noqa: BLE001 - it must not end the connection
                        await self._client.hear_failed(error)
                    at = end + CRLF_SIZE
                    continue
            end = self._end(data, at)
            await super().parse(data[at:end])
            at = end

    def _end(self, data: bytes, at: int) -> int:
        """Where the line, or the body, ends that begins there or has begun before."""
        if self.state == AWAITING_CONTROL_LINE:
            return data.find(b"\n", at) + 1 or len(data)
        return at + self.needed + CRLF_SIZE - len(self.buf)
