"""Whether we keep up: a word to ourselves comes back after all that was said before it."""

from everstep import subjects
from everstep.bus.ports import Bus
from everstep.ids import new_id
from everstep.messages import BeatNow

_AGAIN_AFTER_S = 1.0


class Echo:
    """The server keeps the order of what it sends us: while this is late, so are all beats."""

    def __init__(self, bus: Bus, within_s: float) -> None:
        self._bus = bus
        self._within_s = within_s
        self._name = new_id()[12:24]
        self._is_heard = False
        self._since: float | None = None
        """When the first word was sent that has not come back."""
        self._sent_at = 0.0

    async def hear_for_ever(self) -> None:
        """Hear ourselves."""
        subject = subjects.hail(subjects.CLUSTER, self._name)
        async with self._bus.subscribe(subject, BeatNow) as words:
            self._is_heard = True
            async for _ in words:
                self._since = None

    def is_late(self, now: float) -> bool:
        """What was sent to us longer ago than that has not been read yet."""
        if not self._is_heard:
            return False
        if self._since is None:
            self._since = now
            self._say(now)
        elif now - self._sent_at >= _AGAIN_AFTER_S:
            self._say(now)  # it may be lost, as any other
        return now - self._since > self._within_s

    def forget(self) -> None:
        """The bus was away, and what was on its way is lost."""
        self._since = None

    def _say(self, now: float) -> None:
        self._sent_at = now
        word = BeatNow(
            id=new_id(), job=subjects.CLUSTER, round=0, node=self._name, reason="do we keep up?"
        )
        self._bus.send(subjects.hail(subjects.CLUSTER, self._name), word)
