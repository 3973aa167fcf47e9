"""What a rank tells of its checkpoints: facts to its agent, and lines to people."""

import msgspec

from trainer_sdk.bootstrap.link import Link
from trainer_sdk.saying import say


class Teller:
    """Speaks for one rank; without an agent, to people alone. It never waits and never raises."""

    def __init__(self, rank: int, link: Link | None) -> None:
        self._rank = rank
        self._link = link

    def tell(self, event: str, **body: object) -> None:
        """Tell the agent; `body` has the fields of the fact that are not the agent's own."""
        if self._link is not None:
            said = msgspec.json.encode(body).decode()
            self._link.say("checkpointed", f'"event":"{event}","body":{said}')

    def warn(self, text: str) -> None:
        """One line for people."""
        say(text, self._rank)
