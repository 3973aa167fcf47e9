"""Pauses: while one is open, nobody judges the rank."""

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
    """Ends by itself, at the end of `with`, or by `resume`; whichever comes first."""

    def __init__(self, pauses: "Pauses", until: float) -> None:
        self._pauses = pauses
        self.until = until
        """When it ends by itself; 0 for never."""

    def end(self) -> None:
        """End it now."""
        self._pauses.end(self)

    def __enter__(self) -> None:
        """It has begun already."""

    def __exit__(
        self,
        kind: "type[BaseException] | None",
        error: "BaseException | None",
        trace: "TracebackType | None",
    ) -> None:
        self.end()


class Pauses:
    """Those that are open."""

    def __init__(self, link: AgentLink, table: SectionTable) -> None:
        self._link = link
        self._table = table
        self._open: list[Pause] = []
        self._lock = RLock()

    def begin(self, for_s: float | None, reason: str) -> Pause:
        """One more."""
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
            self._link.say("paused", f'"reason":{quoted(reason)},"for_s":{shown}')
        return pause

    def end(self, pause: Pause) -> None:
        """It is over; nothing happens if it was before."""
        with self._lock:
            if pause not in self._open:
                return
            self._open.remove(pause)
            self._table.go_on(monotonic())
            self._show()
            is_last = not self._open
        if is_last:
            self._link.say("resumed", f'"step":{self._table.words[layout.STEP]}')

    def end_latest(self) -> None:
        """The one that began last is over."""
        with self._lock:
            if self._open:
                self.end(self._open[-1])
            else:
                self._table.misused("`resume` was called without a pause")

    def detach(self) -> None:
        """Go on in a fork of the rank."""
        self._lock = RLock()

    def _show(self) -> None:
        """A reader in between sees a pause that is too long rather than none."""
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
        except Exception:  # noqa: BLE001 - whatever it is, it is no number
            seconds = -1.0
        if seconds >= 0:
            return min(seconds, _LONGEST_S)
        self._table.misused(f"a pause of {quoted(for_s)} seconds ends only when it is resumed")
        return None
