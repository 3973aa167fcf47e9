"""Pauses: while a pause is open, the agent does not judge the rank."""

from _thread import RLock
from time import monotonic

from trainer_sdk import layout
from trainer_sdk.bootstrap.agent_link import AgentLink
from trainer_sdk.sdk_log import quoted
from trainer_sdk.section_table import SECOND_NS, SectionTable

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

_LONGEST_S = 1e9


class Pause:
    """A pause, until its time is over, `with` ends, or `resume` is called."""

    def __init__(self, pauses: "Pauses", until: float) -> None:
        self._pauses = pauses
        self.until = until
        """When the pause ends by itself; 0 for never."""

    def end(self) -> None:
        """End the pause now."""
        self._pauses.end(self)

    def __enter__(self) -> None:
        """Do nothing: the pause has begun already."""

    def __exit__(
        self,
        kind: "type[BaseException] | None",
        error: "BaseException | None",
        trace: "TracebackType | None",
    ) -> None:
        self.end()


class Pauses:
    """The open pauses of a rank."""

    def __init__(self, link: AgentLink, table: SectionTable) -> None:
        self._link = link
        self._table = table
        self._open: list[Pause] = []
        self._lock = RLock()

    def begin(self, for_s: float | None, reason: str) -> Pause:
        """Begin a pause of `for_s` seconds; without `for_s` it lasts until it is ended."""
        now = monotonic()
        for_s = self._seconds(for_s)
        pause = Pause(self, 0.0 if for_s is None else now + for_s)
        with self._lock:
            self._open = [other for other in self._open if not other.until or other.until > now]
            is_first = not self._open
            self._open.append(pause)
            self._show()
        if is_first:
            shown = "null" if for_s is None else repr(for_s)
            self._link.send("paused", f'"reason":{quoted(reason)},"for_s":{shown}')
        return pause

    def end(self, pause: Pause) -> None:
        """End a pause, unless it has ended already."""
        with self._lock:
            if pause not in self._open:
                return
            self._open.remove(pause)
            self._table.go_on(monotonic())
            self._show()
            is_last = not self._open
        if is_last:
            self._link.send("resumed", f'"step":{self._table.words[layout.STEP]}')

    def end_latest(self) -> None:
        """End the pause that began last."""
        with self._lock:
            if self._open:
                self.end(self._open[-1])
            else:
                self._table.misused("`resume` was called without a pause")

    def begin_round(self) -> None:
        """Forget the pauses of a round that has ended."""
        with self._lock:
            self._open.clear()

    def detach(self) -> None:
        """Make the lock anew in a fork of the rank."""
        self._lock = RLock()

    def _show(self) -> None:
        """Write the pauses; a reader in between sees a pause that is too long, never none."""
        words = self._table.words
        ends = [pause.until for pause in self._open]
        until = max(ends) if ends and all(ends) else 0.0
        words[layout.PAUSED_UNTIL_NS] = int(until * SECOND_NS)
        words[layout.PAUSED] = len(ends)

    def _seconds(self, for_s: object) -> float | None:
        if for_s is None:
            return None
        try:
            seconds = float(for_s)  # type: ignore[arg-type]
        except Exception:  # noqa: BLE001 - it is not a number
            seconds = -1.0
        if seconds >= 0:
            return min(seconds, _LONGEST_S)
        self._table.misused(f"for_s={quoted(for_s)} is not a time: the pause ends only by `resume`")
        return None
