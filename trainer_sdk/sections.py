"""Sections: named, timed stretches of a rank's step, written to its page as they happen.

All of it runs inside the training step: it never waits, never raises, and asks the system only for
the time. Lanes and page are consistent at each moment, for other threads and signal handlers.
"""

from time import monotonic, thread_time

from trainer_sdk import layout

TYPE_CHECKING = False  # `typing` would cost every rank more than all of this
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import Any, ParamSpec, TypeVar

    from trainer_sdk.device.device_timer import EventPair
    from trainer_sdk.section_table import SectionTable

    P = ParamSpec("P")
    R = TypeVar("R")

# Globals are looked up faster than attributes of a module.
_DEEPEST = layout.DEEPEST
_IN_RING = layout.RING_ENTRIES - 1
_IN_ENDS = layout.ENDS_ENTRIES - 1
_IN_CPU = layout.CPU_ENTRIES - 1
_IN_DEVICE = layout.DEVICE_ENTRIES - 1
_MOST_OPEN = 1024  # no program nests this deep: sections are entered repeatedly and never left
_NOT_YET = float("inf")
_UNTIMED = -1.0
_CPU_EVERY = 5  # a number of microbatches or workers that is rarely used
_COROUTINE = 0x80  # a flag of a function's code


class Lane:
    """The open sections of a thread, and since when each is open."""

    __slots__ = (
        *("__weakref__", "_at", "_seconds", "_words", "cpu", "deep", "depth", "frames"),
        *("longest_gap", "moved", "number", "pairs", "sections", "since", "thread"),
    )

    def __init__(self, words: "memoryview[int]", number: int | None, thread: int) -> None:
        self.thread = thread
        self.depth = 0
        """The number of open entries in the next lists; one more if `deep` has any."""
        self.sections: list[Section | None] = [None] * (_DEEPEST + 1)
        self.since = [0.0] * _DEEPEST
        self.cpu = [_UNTIMED] * (_DEEPEST + 1)
        """The processor time of the thread at each entry, where it is measured."""
        self.pairs: list[EventPair | None] = [None] * _DEEPEST
        """The events of each entry, where its time on the accelerator is measured."""
        self.deep: list[tuple[Section, float]] = []
        """The open sections that are too deep to be shown."""
        self.moved = monotonic()
        self.longest_gap = _NOT_YET
        """The longest time outside all sections, since the first step."""
        self.place(words, number)

    @property
    def opened(self) -> "list[tuple[Section, float]]":
        """The open sections and since when, the outermost first."""
        shown = zip(self.sections[: self.depth], self.since, strict=False)
        return [(section, since) for section, since in shown if section is not None] + self.deep

    def place(self, words: "memoryview[int]", number: int | None) -> None:
        """Show the lane at this number from now on; nowhere if it is None."""
        if number is None:
            words = memoryview(bytearray(8 * layout.LANE_WORDS)).cast("q")
        else:
            at = layout.LANES_AT + number * layout.LANE_WORDS
            words = words[at : at + layout.LANE_WORDS]
        self.number = number
        words[layout.LANE_THREAD] = 0
        self._seconds = seconds_of(words)
        self.frames = self._seconds[layout.LANE_FRAMES : layout.LANE_FRAMES + _DEEPEST]
        for depth in range(_DEEPEST):
            self.frames[depth] = 0.0
        for depth, (section, since) in enumerate(self.opened[:_DEEPEST]):
            self.frames[depth] = section.tag + since
        self._seconds[layout.LANE_MOVED_S] = self.moved
        words[layout.LANE_THREAD] = self.thread

    def begin_round(self, words: "memoryview[int]") -> None:
        """Show the lane on the page of another round."""
        self.moved, self.longest_gap = monotonic(), _NOT_YET
        self.place(words, self.number)

    def forget_cpu(self) -> None:
        """Forget the processor times at the entries of open sections."""
        for depth in range(_DEEPEST):
            self.cpu[depth] = _UNTIMED

    def move(self, now: float) -> None:
        """Note progress of the thread outside shown sections."""
        self.moved = self._seconds[layout.LANE_MOVED_S] = now


def seconds_of(words: "memoryview[int]") -> "memoryview[float]":
    """The same words as doubles, for fields that have seconds."""
    return words.cast("B").cast("d")


class Section:
    """A named stretch: enter it with `with`, as a decorator, or by `enter` and `leave`.

    There is one object for each name. Each thread has its own list of open sections, so a section
    may be entered again inside itself, and by several threads at once. It must end in the thread in
    which it began.
    """

    __slots__ = (
        *("_table", "_cpu", "_device", "_ended", "_ends", "_here", "_longest", "_own", "_ring"),
        *("name", "number", "tag"),
    )

    def __init__(self, table: "SectionTable", number: int, name: str, *, learns: bool) -> None:
        self._table = table
        self._here = table.here
        self._ended = 0
        self._longest = 0.0 if learns else _NOT_YET
        self.name = name
        self.number = number
        self.tag = number * layout.FRAME_STEP
        self.place(table.words)

    def place(self, words: "memoryview[int]") -> None:
        """Write to this page from now on."""
        at = layout.SECTIONS_AT + self.number * layout.SECTION_WORDS
        self._own = words[at : at + layout.SECTION_WORDS]
        at = layout.RINGS_AT + self.number * layout.RING_ENTRIES
        self._ring = seconds_of(words[at : at + layout.RING_ENTRIES])
        at = layout.ENDS_AT + self.number * layout.ENDS_ENTRIES
        self._ends = seconds_of(words[at : at + layout.ENDS_ENTRIES])
        at = layout.CPU_AT + self.number * layout.CPU_ENTRIES
        self._cpu = seconds_of(words[at : at + layout.CPU_ENTRIES])
        at = layout.DEVICE_AT + self.number * layout.DEVICE_ENTRIES
        self._device = seconds_of(words[at : at + layout.DEVICE_ENTRIES])

    def __enter__(self) -> None:
        try:
            lane = self._here.lane
        except AttributeError:  # the first section of this thread
            lane = self._table.lane()
        depth = lane.depth
        now = monotonic()
        if not depth:
            if now - lane.moved > lane.longest_gap:
                self._table.note_gap(lane, now)
        elif depth >= _DEEPEST:
            self._enter_deep(lane, now)
            return
        lane.sections[depth] = self
        lane.since[depth] = now
        lane.frames[depth] = self.tag + now
        lane.depth = depth + 1

    def __exit__(
        self,
        kind: "type[BaseException] | None" = None,
        error: "BaseException | None" = None,
        trace: "TracebackType | None" = None,
    ) -> None:
        lane = self._table.only or self._table.lane()
        depth = lane.depth - 1
        if lane.sections[depth] is not self:  # the entry after the last is never a section
            self._leave_otherwise(lane)
            return
        now = monotonic()
        lane.depth = depth
        lane.moved = lane.frames[depth] = now
        took = now - lane.since[depth]
        self._ended = ended = self._ended + 1
        self._ring[ended & _IN_RING] = took
        self._ends[ended & _IN_ENDS] = now
        self._own[0] = ended
        if took > self._longest:
            self._note(now - took, now)

    enter = __enter__
    leave = __exit__

    def __call__(self, function: "Callable[P, R]") -> "Callable[P, R]":
        """Decorate a function, or a coroutine: each call of it is this section."""
        from functools import wraps  # most scripts use `with`

        code = getattr(function, "__code__", None)
        if code is not None and code.co_flags & _COROUTINE:
            later: Any = function

            @wraps(later)
            async def timed_later(*args: "P.args", **kwargs: "P.kwargs") -> "Any":
                with self:
                    return await later(*args, **kwargs)

            return timed_later  # type: ignore[return-value]

        @wraps(function)
        def timed(*args: "P.args", **kwargs: "P.kwargs") -> "R":
            with self:
                return function(*args, **kwargs)

        return timed

    def begin_round(self, words: "memoryview[int]") -> None:
        """Write to the page of another round: counts and times begin anew."""
        self._ended, self._longest = 0, _NOT_YET
        self.place(words)

    def begin_learning(self) -> None:
        """Note that the first step is finished: durations from now on are typical."""
        self._longest = 0.0
        self._own[layout.SECTION_BEFORE] = self._ended

    def take_device(self, took: float) -> None:
        """Write a time on the accelerator; it may be of some steps ago."""
        count = self._own[layout.SECTION_DEVICE_COUNT] + 1
        self._device[count & _IN_DEVICE] = took
        self._own[layout.SECTION_DEVICE_COUNT] = count

    def _note(self, since: float, now: float) -> None:
        """Note the longest duration so far, without pauses and compilations in it."""
        took = now - self._table.typical_since(since)
        if took > self._longest:
            self._longest = took
            seconds_of(self._own)[layout.SECTION_LONGEST_S] = took

    def _enter_deep(self, lane: Lane, now: float) -> None:
        lane.deep.append((self, now))
        lane.depth = _DEEPEST + 1
        if len(lane.deep) > _MOST_OPEN:
            self._table.leave_all(lane)

    def _leave_otherwise(self, lane: Lane) -> None:
        """Leave a section that is too deep to be shown, not the innermost, or not open."""
        if all(section is not self for section, _ in lane.opened):
            self._table.never_begun(self.name)
            return
        while (innermost := lane.opened[-1][0]) is not self:
            innermost.leave()
        if not lane.deep:
            self.leave()
            return
        _, since = lane.deep.pop()
        lane.depth = _DEEPEST + bool(lane.deep)
        now = monotonic()
        lane.move(now)
        self._ended = ended = self._ended + 1
        self._ring[ended & _IN_RING] = now - since
        self._ends[ended & _IN_ENDS] = now
        self._own[0] = ended
        self._note(since, now)


class TimedSection(Section):
    """A plain section that also measures the processor time of its thread, every fifth time.

    A section's class changes between two steps, so that plain sections spend nothing on this: to
    ask the kernel for that time costs more than all the rest.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        Section.__enter__(self)
        if self._ended % _CPU_EVERY:
            return
        lane = self._table.only or self._table.lane()
        lane.cpu[lane.depth - 1] = thread_time()

    def __exit__(self, *_: object) -> None:
        lane = self._table.only or self._table.lane()
        depth = lane.depth - 1
        if lane.cpu[depth] < 0.0 or lane.sections[depth] is not self:
            Section.__exit__(self)
            return
        cpu = thread_time() - lane.cpu[depth]
        lane.cpu[depth] = _UNTIMED
        count = self._own[layout.SECTION_CPU_COUNT] + 1
        self._cpu[count & _IN_CPU] = cpu
        self._own[layout.SECTION_CPU_COUNT] = count
        Section.__exit__(self)

    enter = __enter__
    leave = __exit__


class DeviceSection(Section):
    """A plain section that also measures its time on the accelerator.

    Another thread may change its class at any moment, so its methods do not depend on the class.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        Section.__enter__(self)
        _begin_on_device(self, self._table)

    def __exit__(self, *_: object) -> None:
        _end_on_device(self, self._table)
        Section.__exit__(self)

    enter = __enter__
    leave = __exit__


class TimedDeviceSection(Section):
    """A plain section that measures both times."""

    __slots__ = ()

    def __enter__(self) -> None:
        TimedSection.__enter__(self)  # type: ignore[arg-type]
        _begin_on_device(self, self._table)

    def __exit__(self, *_: object) -> None:
        _end_on_device(self, self._table)
        TimedSection.__exit__(self)  # type: ignore[arg-type]

    enter = __enter__
    leave = __exit__


def _begin_on_device(section: Section, table: "SectionTable") -> None:
    lane, timer = table.only or table.lane(), table.device
    depth = lane.depth - 1
    if timer is None or depth >= _DEEPEST:
        return
    try:
        lane.pairs[depth] = timer.begin(section.number)
    except Exception as error:  # noqa: BLE001 - a failed measurement must not fail the training
        table.give_up_device(error)


def _end_on_device(section: Section, table: "SectionTable") -> None:
    lane, timer = table.only or table.lane(), table.device
    depth = lane.depth - 1
    if timer is None or depth >= _DEEPEST or lane.sections[depth] is not section:
        return
    pair, lane.pairs[depth] = lane.pairs[depth], None
    try:
        if pair is not None:
            timer.end(section, pair)
    except Exception as error:  # noqa: BLE001 - as above
        table.give_up_device(error)


class LongSection(Section):
    """A section of a long phase: its time is not part of the step that it interrupts."""

    __slots__ = ()

    def __exit__(self, *_: object) -> None:
        lane = self._table.lane()
        since = next((since for section, since in reversed(lane.opened) if section is self), None)
        super().__exit__()
        if since is not None and not any(
            isinstance(section, LongSection) for section, _ in lane.opened
        ):
            self._table.leave_long_phase(lane, since)

    leave = __exit__
