"""All sections of a rank, and the sections that each of its threads is in."""

from _thread import RLock, _local, get_native_id
from _weakref import ref
from struct import pack, unpack
from time import monotonic_ns

from trainer_sdk import layout
from trainer_sdk.sdk_log import quoted, warn_once
from trainer_sdk.sections import (
    DeviceSection,
    Lane,
    LongSection,
    Section,
    TimedDeviceSection,
    TimedSection,
    seconds_of,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trainer_sdk.device.device_timer import DeviceTimer

SECOND_NS = 1_000_000_000
_KINDS = {
    "plain": layout.KIND_PLAIN,
    "checkpoint": layout.KIND_CHECKPOINT,
    "evaluation": layout.KIND_EVALUATION,
}
_CHECKPOINTS = ("checkpoint", "ckpt", "save", "saving")
_EVALUATIONS = ("eval", "valid")
_NAME_WORDS = layout.VALUE_NAME_BYTES // 8


class SectionTable:
    """The sections of a rank, and a lane for each thread: the sections it is in."""

    def __init__(self, words: "memoryview[int]") -> None:
        self.words = words
        self.here = _local()
        """Has the `lane` of each thread, and forgets it when the thread ends."""
        self.here.lane = self.main = Lane(words, 0, get_native_id())
        """The lane of the thread that makes the steps."""
        self.only: Lane | None = self.main
        """The only lane; None once there are several."""
        self.sections: dict[str, Section] = {}
        self.long_s = 0.0
        """The time in long phases since the last step."""
        self.stepped = 0.0
        """The instant at which the last step was finished."""
        self.fresh = 0.0
        """The end of the last pause, or of the first step: durations before it are not typical."""
        self.is_cpu_timed = False
        """Whether plain sections measure the processor time of their thread."""
        self.device: DeviceTimer | None = None
        """Measures the time of plain sections on the accelerator; None if they do not."""
        self._learns = False
        self._misuses = 0
        self._lock = RLock()  # a signal handler may interrupt
        self._lanes = [ref(self.main)]
        self._others: Section | None = None
        self._show(layout.OUTSIDE, "", layout.KIND_PLAIN)

    def section(self, name: str, kind: str = "") -> Section:
        """The section of this name, always the same object."""
        name, kind = str(name) or "(unnamed)", str(kind)
        with self._lock:
            section = self.sections.get(name)
            if section is not None:
                return section
            if kind and kind not in _KINDS:
                self.misused(
                    f"the kind of a section is plain, checkpoint or evaluation, not {kind!r}"
                )
            number = len(self.sections) + 1
            if number >= layout.OTHERS:
                return self._other(name)
            section = self._add(number, name, _KINDS.get(kind, kind_of(name)))
            self.sections[name] = section
            return section

    def end(self, name: str) -> None:
        """Leave a section of this thread, and all that are still open inside it."""
        section = self.sections.get(name)
        if section is None:
            self.never_begun(name)
        else:
            section.leave()

    def leave_all(self, lane: Lane) -> None:
        """Leave every section that this thread is in."""
        opened = lane.opened
        if len(opened) > layout.DEEPEST:
            self.misused(f"section {opened[-1][0].name!r} is entered repeatedly and never left")
        for section, _ in reversed(opened):
            section.leave()

    def leave_long_phase(self, lane: Lane, since: float) -> None:
        """Note that the thread has left its outermost section of a long phase."""
        if lane is self.main:
            self.long_s += lane.moved - max(since, self.stepped)
            self.progress(lane.moved)

    def progress(self, now: float) -> None:
        """Note progress of the rank."""
        seconds_of(self.words)[layout.PROGRESS_S] = now

    def note_gap(self, lane: Lane, now: float) -> None:
        """Note the longest time so far that the main thread was outside all sections."""
        gap = now - self.typical_since(lane.moved)
        if gap > lane.longest_gap:
            lane.longest_gap = gap
            seconds_of(self.words)[layout.SECTIONS_AT + layout.SECTION_LONGEST_S] = gap

    def typical_since(self, since: float) -> float:
        """The start of the typical part of a duration: after pauses and compilations."""
        return max(since, self.fresh, self.words[layout.COMPILED_NS] / SECOND_NS)

    def lane(self) -> Lane:
        """The lane of this thread."""
        lane: Lane | None = getattr(self.here, "lane", None)
        return self._new_lane() if lane is None else lane

    def lead(self) -> None:
        """Make the lane of this thread the first: this thread makes the steps."""
        lane = self.lane()
        with self._lock:
            if lane is not self.main:
                self.main.place(self.words, lane.number)
                lane.place(self.words, 0)
                self.main = lane

    def begin_learning(self, now: float) -> None:
        """Note that the first step is finished: durations from now on are typical."""
        with self._lock:
            self._learns = True
            self.fresh = now
            self.main.longest_gap = 0.0
            for section in self._all():
                section.begin_learning()

    def time_cpu(self, *, is_wanted: bool) -> None:
        """Have plain sections measure the processor time of their thread, or not."""
        with self._lock:
            self.is_cpu_timed = is_wanted
            for lane in self._alive():
                lane.forget_cpu()
            self._change_sections()

    def time_device(self, timer: "DeviceTimer | None") -> None:
        """Have plain sections measure their time on the accelerator, or not."""
        with self._lock:
            self.device = timer
            self._change_sections()

    def give_up_device(self, error: Exception) -> None:
        """Stop measuring times on the accelerator, after an error."""
        self.time_device(None)
        warn_once(f"times on the accelerator are not measured any more: {quoted(error)}")

    def go_on(self, now: float) -> None:
        """Note the end of a pause: no section or step is charged for it."""
        self.progress(now)
        self.fresh = now
        self.long_s = 0.0
        if self.stepped:
            self.stepped = now
        for lane in self._alive():
            lane.move(now)

    def never_begun(self, name: str) -> None:
        """Report the end of a section that this thread is not in."""
        self.misused(f"section {name!r} was ended, but had not begun in this thread, or had ended")

    def misused(self, text: str) -> None:
        """Count an invalid call, which is ignored, and report it once on stderr."""
        self._count_misuse()
        warn_once(text)

    def begin_round(self, words: "memoryview[int]") -> None:
        """Write to the page of another round: names stay, counts and times begin anew."""
        with self._lock:
            before, self.words = self.words, words
            self.long_s = self.stepped = self.fresh = 0.0
            self._learns = False
            self.time_cpu(is_wanted=False)
            self._show(layout.OUTSIDE, "", layout.KIND_PLAIN)
            for section in self._all():
                at = layout.SECTIONS_AT + section.number * layout.SECTION_WORDS
                self._show(section.number, section.name, before[at + layout.SECTION_KIND])
                section.begin_round(words)
            for lane in self._alive():
                lane.begin_round(words)

    def detach(self, words: "memoryview[int]") -> None:
        """Write to other memory: this process is a fork of the rank, and has only this thread."""
        self.words = words
        self._lock = RLock()
        self.main = self.only = self.lane()
        self.main.place(words, 0)
        self._lanes = [ref(self.main)]
        self.time_device(None)  # a fork cannot use its parent's CUDA context
        for section in self._all():
            section.place(words)

    def _all(self) -> list[Section]:
        named = list(self.sections.values())
        return named if self._others is None else [*named, self._others]

    def _other(self, name: str) -> Section:
        if self._others is None:
            self._others = self._add(layout.OTHERS, "(others)", layout.KIND_EVALUATION)
            warn_once(
                f"there are more than {layout.OTHERS - 1} names of sections; {name!r} and later "
                f"names share a single section: use fewer names, without numbers in them"
            )
        self._count_misuse()
        return self._others

    def _count_misuse(self) -> None:
        self._misuses += 1
        self.words[layout.MISUSES] = self._misuses

    def _add(self, number: int, name: str, kind: int) -> Section:
        self._show(number, name, kind)
        section_class = LongSection if kind else self._plain()
        return section_class(self, number, name, learns=self._learns)

    def _plain(self) -> type[Section]:
        """The class of plain sections."""
        if self.device is not None:
            return TimedDeviceSection if self.is_cpu_timed else DeviceSection
        return TimedSection if self.is_cpu_timed else Section

    def _change_sections(self) -> None:
        plain = self._plain()
        for section in self.sections.values():
            if not isinstance(section, LongSection):
                section.__class__ = plain

    def _show(self, number: int, name: str, kind: int) -> None:
        at = layout.NAMES_AT + number * layout.NAME_WORDS
        write_text(self.words, at, name, layout.NAME_BYTES)
        at = layout.SECTIONS_AT + number * layout.SECTION_WORDS
        self.words[at + layout.SECTION_KIND] = kind
        self.words[layout.SECTIONS] = number + 1  # written last: the reader waits for it

    def _new_lane(self) -> Lane:
        with self._lock:
            alive = self._alive()
            taken = {lane.number for lane in [self.main, *alive]}
            free = (number for number in range(layout.LANES) if number not in taken)
            # Threads beyond the number of lanes are timed, but not shown.
            lane = Lane(self.words, next(free, None), get_native_id())
            self._lanes = [ref(other) for other in [*alive, lane]]
            self.only = None
            self.here.lane = lane
            return lane

    def _alive(self) -> list[Lane]:
        """The lanes of threads that have not ended."""
        return [lane for reference in self._lanes if (lane := reference()) is not None]


def kind_of(name: str) -> int:
    """The kind of a section, guessed from how the words of its name begin."""
    words = "".join(letter if letter.isalpha() else " " for letter in name.lower()).split()
    if any(word.startswith(_CHECKPOINTS) for word in words):
        return layout.KIND_CHECKPOINT
    if any(word.startswith(_EVALUATIONS) or word == "val" for word in words):
        return layout.KIND_EVALUATION
    return layout.KIND_PLAIN


def write_text(words: "memoryview[int]", at: int, text: str, most: int) -> None:
    """Write a text into words: shortened to whole characters, and padded with zeros."""
    octets = text.encode(errors="replace")
    if len(octets) > most:
        octets = octets[: most - 3].decode(errors="ignore").encode() + "…".encode()
    octets = octets.ljust(most, b"\0")
    for word in range(most // 8):
        part = octets[word * 8 : word * 8 + 8]
        words[at + word] = int.from_bytes(part, "little", signed=True)


class ReportedMetrics:
    """The latest value of each metric, by name."""

    def __init__(self, words: "memoryview[int]", table: SectionTable) -> None:
        self._words = words
        self._table = table
        self._numbers: dict[str, int] = {}
        self._lock = RLock()

    def show(self, name: str, value: float) -> None:
        """Write the latest value of a metric."""
        bits = self._bits(str(name), value)
        if bits is None:
            return
        at = self._place(str(name))
        if at is not None:
            now = monotonic_ns()
            self._words[at + _NAME_WORDS] = bits
            self._words[at + _NAME_WORDS + 1] = now

    def begin_round(self, words: "memoryview[int]") -> None:
        """Write to the page of another round, which has no metrics yet."""
        with self._lock:
            self._words = words
            self._numbers.clear()

    def detach(self, words: "memoryview[int]") -> None:
        """Write to other memory from now on."""
        self._words = words
        self._lock = RLock()

    def _bits(self, name: str, value: float) -> int | None:
        if getattr(value, "is_cuda", False):
            self._table.misused(f"{name!r} is on a GPU, and reading it would wait: report a number")
            return None
        try:
            (bits,) = unpack("q", pack("d", value))
        except Exception:  # noqa: BLE001 - tensors and others raise errors of their own
            self._table.misused(f"{name!r} must be a number, and is {type(value)}")
            return None
        return int(bits)

    def _place(self, name: str) -> int | None:
        number = self._numbers.get(name)
        if number is None:
            with self._lock:
                number = self._numbers.get(name)
                if number is None:
                    number = len(self._numbers)
                    if number >= layout.VALUES_MOST:
                        self._table.misused(
                            f"{name!r} is not shown: a page has {layout.VALUES_MOST} values at most"
                        )
                        return None
                    at = layout.VALUES_AT + number * layout.VALUE_WORDS
                    write_text(self._words, at, name, layout.VALUE_NAME_BYTES)
                    self._words[layout.VALUES] = number + 1
                    self._numbers[name] = number
        return layout.VALUES_AT + number * layout.VALUE_WORDS
