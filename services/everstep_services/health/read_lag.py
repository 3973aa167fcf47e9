"""How far we have read: a word to ourselves comes back after all that was said before it."""

from everstep import subjects
from everstep.bus.ports import Bus
from everstep.ids import new_id
from everstep.messages import BeatNow


class Echo:
    """The server keeps the order of what it sends us: when a word is back, so is all before it.

    A word at each tick, and not one after the other: that one which took long is back at last
    tells nothing of what was said while it was on its way.
    """

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._name = new_id()[12:24]
        self._is_heard = False
        self._read_at: float | None = None
        self._words: dict[str, float] = {}
        """When each was said that has not come back."""

    async def hear_for_ever(self) -> None:
        """Hear ourselves."""
        subject = subjects.hail(subjects.CLUSTER, self._name)
        async with self._bus.subscribe(subject, BeatNow) as words:
            self._is_heard = True
            async for word in words:
                if word.id in self._words:
                    self._came_back(word.id)

    def read_at(self, now: float) -> float:
        """All that was sent to us until then has been read. Ask at each tick: a word is said."""
        if not self._is_heard:
            return now
        if self._read_at is None:
            self._read_at = now
        self._say(now)
        return self._read_at

    def forget(self) -> None:
        """The bus was away, and what was on its way is lost."""
        self._words.clear()

    def _say(self, now: float) -> None:
        word = BeatNow(
            id=new_id(), job=subjects.CLUSTER, round=0, node=self._name, reason="do we keep up?"
        )
        self._words[word.id] = now
        self._bus.send(subjects.hail(subjects.CLUSTER, self._name), word)

    def _came_back(self, name: str) -> None:
        for one in list(self._words):  # those before it were lost, as any message may be
            self._read_at = self._words.pop(one)
            if one == name:
                return
