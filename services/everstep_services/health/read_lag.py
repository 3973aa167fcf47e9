"""How far health has read: a message to itself comes back after all that was sent before it."""

from everstep import subjects
from everstep.bus.ports import Bus
from everstep.ids import new_id
from everstep.messages import BeatNow


class ReadLag:
    """Sends a marker to itself at each tick. The server keeps the order of what it sends.

    It does not wait for one marker before it sends the next: a marker that took long tells nothing
    about the messages that were sent after it.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._name = new_id()[12:24]
        self._is_subscribed = False
        self._read_at: float | None = None
        self._markers: dict[str, float] = {}
        """When each marker that has not come back was sent, by its id."""

    async def hear_for_ever(self) -> None:
        """Take in the markers that come back."""
        subject = subjects.hail(subjects.CLUSTER, self._name)
        async with self._bus.subscribe(subject, BeatNow) as markers:
            self._is_subscribed = True
            async for marker in markers:
                if marker.id in self._markers:
                    self._returned(marker.id)

    def read_at(self, now: float) -> float:
        """The time before which every message was read. Call it at each tick: it sends a marker."""
        if not self._is_subscribed:
            return now
        if self._read_at is None:
            self._read_at = now
        self._send(now)
        return self._read_at

    def forget(self) -> None:
        """Forget the markers that were under way: the bus was away, and has lost them."""
        self._markers.clear()

    def _send(self, now: float) -> None:
        marker = BeatNow(
            id=new_id(), job=subjects.CLUSTER, round=0, node=self._name, reason="read marker"
        )
        self._markers[marker.id] = now
        self._bus.send(subjects.hail(subjects.CLUSTER, self._name), marker)

    def _returned(self, marker: str) -> None:
        for id_ in list(self._markers):  # the markers before it were lost, as any message may be
            self._read_at = self._markers.pop(id_)
            if id_ == marker:
                return
