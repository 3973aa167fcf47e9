"""The agent's side of a page: what a rank said of itself, read without asking it."""

import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from trainer_sdk import layout

N = TypeVar("N")


class RankPhase(StrEnum):
    """How far a rank is in its own life."""

    STARTING = "starting"
    SCRIPT = "script"
    ENDED = "ended"
    """The script has returned or raised; the process may still be leaving."""


class CountedBy(StrEnum):
    """Who counts the steps."""

    NOBODY = "nobody"
    OPTIMIZER = "optimizer"
    SDK = "sdk"


class SectionKind(StrEnum):
    """What a section is for."""

    PLAIN = "plain"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True)
class PageReading:
    """What a page said at one moment. Instants are of this host's monotonic clock."""

    pid: int
    round: int
    rank: int
    step: int
    """The last step that was finished: in this round, or as the script counts; 0 before."""
    progress_s: float
    """When it last made progress by a step, a heartbeat or a new phase."""
    phase: RankPhase
    script_s: float
    """When the script began; 0 before."""
    first_step_s: float
    """When its first step was made; 0 before."""
    counted_by: CountedBy
    dropped: int
    """Datagrams that the agent had no room for."""
    steps: int = 0
    """Steps finished in this round."""
    longest_step_s: float = 0.0
    """After the first, without what was spent in long phases."""
    pauses: int = 0
    """How many pauses are open."""
    paused_until_s: float = 0.0
    """When they end by themselves; 0 for never."""
    misuses: int = 0
    """Calls of the SDK that made no sense."""
    total_steps: int = 0
    """Where the training ends; 0 if it has not said so."""
    stop_seen_s: float = 0.0
    """When the script first saw that it should stop; 0 before."""
    listens: bool = False
    """The script has asked whether it should stop."""
    group_timeout_s: float = 0.0
    """How long a collective of its default process group may take; 0 if not known."""
    compiling_s: float = 0.0
    """Since when torch compiles; 0 if it does not."""
    compiled_s: float = 0.0
    """When it last ceased to; 0 before."""
    beats: int = 0
    """Heartbeats."""
    first_beat_s: float = 0.0
    """When the first of them was; 0 before."""
    longest_beat_s: float = 0.0
    """Between two of them, or the last of them and the first step."""
    warmup: int = 0
    """So many first steps may take long, as the script says; 0 where it does not say."""
    closed_s: float = 0.0
    """When its session was closed; 0 before."""

    @property
    def is_closed(self) -> bool:
        """Its session is closed, and was not used since."""
        return 0 < self.closed_s >= self.progress_s


@dataclass(frozen=True, slots=True)
class OpenSection:
    """A section that is open."""

    section: int
    since_s: float


@dataclass(frozen=True, slots=True)
class LaneReading:
    """Where one thread is."""

    thread: int
    """As the kernel numbers it."""
    moved_s: float
    """When it last entered or left a section, or made progress otherwise."""
    beat_s: float
    """When it last made progress that no shown section shows, as by a heartbeat."""
    frames: tuple[OpenSection, ...]
    """Its open sections, the outermost first; of very deep ones only the outer."""


@dataclass(frozen=True, slots=True)
class SectionReading:
    """What is known of one section."""

    name: str
    """Empty for the time outside all sections."""
    kind: SectionKind
    count: int
    """How often it ended."""
    longest_s: float
    """Since the first step of the round; 0 if it has not ended since."""
    observed: int
    """How often it ended since the first step."""


@dataclass(frozen=True, slots=True)
class SectionEnd:
    """One end of a section, or of a step."""

    number: int
    """Counted from 1, in this round."""
    took_s: float | None
    """None for the first step, and for those that the optimizer counts."""
    ended_s: float | None
    """None where it is not among the latest 16."""


@dataclass(frozen=True, slots=True)
class PageNews:
    """What a page has that it had not when it was read before."""

    steps: tuple[SectionEnd, ...]
    sections: Mapping[int, tuple[SectionEnd, ...]]
    """By the section's number; only those that ended."""
    counts: Mapping[int, int]
    """How often each of them has ended in all."""
    cpu_s: Mapping[int, tuple[float, ...]]
    """The latest processor times of these sections."""
    cpu_counts: Mapping[int, int]
    """How many of them were written in all."""
    device_s: Mapping[int, tuple[float, ...]]
    """The latest times of these sections on the accelerator."""
    device_counts: Mapping[int, int]
    """How many of them were written in all."""
    open: tuple[OpenSection, ...]
    """The sections that the thread is in that makes the steps, the outermost first."""


class BadPageError(Exception):
    """A page holds what no rank writes; it says what."""


class PageView:
    """A mapped page. It can be read whatever its rank does, and when it is dead.

    Whatever reads it raises BadPageError where it holds what no rank writes.
    """

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self._names: dict[int, str] = {}

    def read(self) -> PageReading | None:
        """What it says now; None as long as the rank has not opened it."""
        with self._words() as words:
            magic = words[layout.MAGIC_AT]
            if magic not in (0, layout.MAGIC):
                raise BadPageError(f"it begins with {magic:#x}")
            return _reading(words) if magic else None

    def lanes(self) -> tuple[LaneReading, ...]:
        """Where each thread is, the one that makes the steps first."""
        with self._words() as words:
            starts = range(layout.LANES_AT, _LANES_END, layout.LANE_WORDS)
            return tuple(_lane(words, at) for at in starts if words[at + layout.LANE_THREAD])

    def section(self, number: int) -> SectionReading:
        """What is known of a section."""
        with self._words() as words:
            if not 0 <= number < _known(words):
                raise BadPageError(f"it has no section {number}")
            return self._section(words, number)

    def sections(self) -> tuple[SectionReading, ...]:
        """Every section that the rank has named."""
        with self._words() as words:
            return tuple(self._section(words, number) for number in range(_known(words)))

    def durations(self, number: int, after: int) -> tuple[float, ...]:
        """The latest durations of a section, those after its first `after` ends only."""
        with self._words() as words:
            if not 0 <= number < _known(words):
                raise BadPageError(f"it has no section {number}")
            count = words[layout.SECTIONS_AT + number * layout.SECTION_WORDS]
            seconds = words.cast("B").cast("d")
            at = layout.RINGS_AT + number * layout.RING_ENTRIES
            first = max(after, count - layout.RING_ENTRIES)
            places = (at + (end & (layout.RING_ENTRIES - 1)) for end in range(first + 1, count + 1))
            return tuple(_plausible(seconds[place]) for place in places)

    def step_durations(self) -> tuple[float, ...]:
        """How long the latest steps took, without what was spent in long phases."""
        with self._words() as words:
            steps = words[layout.STEPS]
            first = max(1, steps - layout.RING_ENTRIES)  # the first one has no beginning
            seconds = words.cast("B").cast("d")
            places = (step & (layout.STEPS_ENTRIES - 1) for step in range(first + 1, steps + 1))
            return tuple(_plausible(seconds[layout.STEPS_AT + place]) for place in places)

    def take(
        self,
        steps: int,
        counts: Mapping[int, int],
        cpu_counts: Mapping[int, int],
        device_counts: Mapping[int, int],
    ) -> PageNews:
        """What came after so many steps, and after so many ends of each section.

        Steps are read last: of a section that ended after a step, the step is known.
        """
        with self._words() as words:
            seconds = words.cast("B").cast("d")
            sections: dict[int, tuple[SectionEnd, ...]] = {}
            cpu: dict[int, tuple[int, tuple[float, ...]]] = {}
            device: dict[int, tuple[int, tuple[float, ...]]] = {}
            now = words[layout.SECTIONS_AT : _SECTIONS_END : layout.SECTION_WORDS].tolist()
            ended = {
                number: count
                for number, count in enumerate(now[: _known(words)])
                if number and count != counts.get(number, 0)
            }
            for number in ended:
                sections[number] = _section_endings(words, seconds, number, counts.get(number, 0))
                cpu[number] = _times(words, seconds, _CPU, number, cpu_counts.get(number, 0))
                after = device_counts.get(number, 0)
                device[number] = _times(words, seconds, _DEVICE, number, after)
            place = layout.LANES_AT
            frames = _lane(words, place).frames if words[place + layout.LANE_THREAD] else ()
            return PageNews(
                steps=_step_endings(words, seconds, steps),
                sections=sections,
                counts={
                    number: _newest(endings, ended[number]) for number, endings in sections.items()
                },
                cpu_s={number: times for number, (_, times) in cpu.items()},
                cpu_counts={number: count for number, (count, _) in cpu.items()},
                device_s={number: times for number, (_, times) in device.items()},
                device_counts={number: count for number, (count, _) in device.items()},
                open=frames,
            )

    def time_cpu(self, *, is_wanted: bool) -> None:
        """Tell the rank whether sections should measure the processor time of their thread."""
        with self._words() as words:
            words[layout.CPU_TIMED] = is_wanted

    def values(self, after_ns: int = -1) -> Mapping[str, float]:
        """What the script has reported last, by name; with `after_ns` only what it reported since.

        That is an instant of this host's monotonic clock.
        """
        with self._words() as words:
            starts = [at for at in _values(words) if words[at + 5] > after_ns]
            return {_text(words, at, _VALUE_NAME_WORDS): _double(words[at + 4]) for at in starts}

    def reported_ns(self, otherwise: int = -1) -> int:
        """When the script reported something last."""
        with self._words() as words:
            return max((words[at + 5] for at in _values(words)), default=otherwise)

    def ask_to_stop(self, after_step: int) -> None:
        """Tell the rank that it should stop, once it has finished this step."""
        with self._words() as words:
            words[layout.STOP_AFTER] = after_step + 1

    def ask_to_save(self, after_step: int) -> None:
        """Tell the rank that it should save, once it has finished this step, and go on."""
        with self._words() as words:
            words[layout.SAVE_AFTER] = after_step + 1

    def give_warmup(self, steps: int) -> None:
        """Tell the rank how many of its first steps may take long."""
        with self._words() as words:
            words[layout.WARMUP_GIVEN] = steps

    def close(self) -> None:
        """Unmap it."""
        self._mapped.close()

    def _words(self) -> "memoryview[int]":
        size = self._mapped.size()
        if size < layout.PAGE_BYTES:  # to touch what was cut off would end this process
            raise BadPageError(f"it was cut to {size} bytes")
        return memoryview(self._mapped).cast("q")

    def _section(self, words: "memoryview[int]", number: int) -> SectionReading:
        name = self._names.get(number)
        if name is None:
            at = layout.NAMES_AT + number * layout.NAME_WORDS
            name = self._names[number] = _text(words, at, layout.NAME_WORDS)
        at = layout.SECTIONS_AT + number * layout.SECTION_WORDS
        before = words[at + layout.SECTION_BEFORE]  # the first: it never passes the count
        count = words[at + layout.SECTION_COUNT]
        longest_s = _plausible(_double(words[at + layout.SECTION_LONGEST_S]))
        if not 0 <= before <= count:
            raise BadPageError(f"section {name!r} ended {count} times, {before} before it learned")
        return SectionReading(
            name=name,
            kind=_one_of(_KINDS, words[at + layout.SECTION_KIND], "kind"),
            count=count,
            longest_s=longest_s,
            observed=count - before,
        )


def view_page(path: str) -> PageView:
    """The page that a rank has made itself; ValueError where it is no page."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return PageView(mmap.mmap(descriptor, layout.PAGE_BYTES))
    finally:
        os.close(descriptor)


def make_page(path: str) -> PageView:
    """Make an empty page for a rank that is about to start; only its owner may read it."""
    with suppress(FileNotFoundError):
        os.unlink(path)  # a rank of an earlier round that outlived it keeps its own
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # All of it now: where memory is short, this fails, and not a rank that writes to it.
        os.posix_fallocate(descriptor, 0, layout.PAGE_BYTES)
        return PageView(mmap.mmap(descriptor, layout.PAGE_BYTES))
    finally:
        os.close(descriptor)


_PHASES = {
    layout.PHASE_STARTING: RankPhase.STARTING,
    layout.PHASE_SCRIPT: RankPhase.SCRIPT,
    layout.PHASE_ENDED: RankPhase.ENDED,
}
_COUNTERS = {
    layout.BY_NOBODY: CountedBy.NOBODY,
    layout.BY_OPTIMIZER: CountedBy.OPTIMIZER,
    layout.BY_SDK: CountedBy.SDK,
}
_KINDS = {
    layout.KIND_PLAIN: SectionKind.PLAIN,
    layout.KIND_CHECKPOINT: SectionKind.CHECKPOINT,
    layout.KIND_EVALUATION: SectionKind.EVALUATION,
}
_NEVER_NEGATIVE = (
    *range(layout.PID, layout.GROUP_TIMEOUT_NS + 1),
    layout.COMPILING_NS,
    layout.COMPILED_NS,
    layout.WARMUP,
    layout.WARMUP_GIVEN,
)
_ENDS = layout.ENDS_ENTRIES
_CPU = (layout.SECTION_CPU_COUNT, layout.CPU_AT, layout.CPU_ENTRIES)
_DEVICE = (layout.SECTION_DEVICE_COUNT, layout.DEVICE_AT, layout.DEVICE_ENTRIES)
_LANES_END = layout.LANES_AT + layout.LANES * layout.LANE_WORDS
_SECTIONS_END = layout.SECTIONS_AT + layout.SECTIONS_MOST * layout.SECTION_WORDS
_VALUE_NAME_WORDS = layout.VALUE_NAME_BYTES // 8
_MOST_S = layout.SECTIONS_MOST * layout.FRAME_STEP


def _values(words: "memoryview[int]") -> Iterable[int]:
    """Where each value begins."""
    count = words[layout.VALUES]
    if not 0 <= count <= layout.VALUES_MOST:
        raise BadPageError(f"it has {count} values")
    return (layout.VALUES_AT + number * layout.VALUE_WORDS for number in range(count))


def _reading(words: "memoryview[int]") -> PageReading:
    for place in _NEVER_NEGATIVE:
        if words[place] < 0:
            raise BadPageError(f"its word {place} is {words[place]}")
    return PageReading(
        pid=words[layout.PID],
        round=words[layout.ROUND],
        rank=words[layout.RANK],
        step=words[layout.STEP],
        progress_s=_progress_s(words),
        phase=_one_of(_PHASES, words[layout.PHASE], "phase"),
        script_s=words[layout.SCRIPT_NS] / 1e9,
        first_step_s=words[layout.FIRST_STEP_NS] / 1e9,
        counted_by=_one_of(_COUNTERS, words[layout.COUNTED_BY], "counter of steps"),
        dropped=words[layout.DROPPED],
        steps=words[layout.STEPS],
        longest_step_s=words[layout.LONGEST_STEP_NS] / 1e9,
        pauses=words[layout.PAUSED],
        paused_until_s=words[layout.PAUSED_UNTIL_NS] / 1e9,
        misuses=words[layout.MISUSES],
        total_steps=words[layout.TOTAL_STEPS],
        stop_seen_s=words[layout.STOP_SEEN_NS] / 1e9,
        listens=words[layout.LISTENS] == 1,
        group_timeout_s=words[layout.GROUP_TIMEOUT_NS] / 1e9,
        compiling_s=words[layout.COMPILING_NS] / 1e9,
        beats=words[layout.BEATS],
        first_beat_s=_plausible(_double(words[layout.FIRST_BEAT_S])),
        longest_beat_s=_plausible(_double(words[layout.LONGEST_BEAT_S])),
        warmup=words[layout.WARMUP_GIVEN] or words[layout.WARMUP],
        closed_s=_plausible(_double(words[layout.CLOSED_S])),
        compiled_s=words[layout.COMPILED_NS] / 1e9,  # the last: it is written first
    )


def _known(words: "memoryview[int]") -> int:
    count = words[layout.SECTIONS]
    if not 0 <= count <= layout.SECTIONS_MOST:
        raise BadPageError(f"it names {count} sections")
    return count


def _count(words: "memoryview[int]", place: int) -> int:
    count = words[place]
    if count < 0:
        raise BadPageError(f"its word {place} is {count}")
    return count


def _section_endings(
    words: "memoryview[int]", seconds: "memoryview[float]", number: int, after: int
) -> tuple[SectionEnd, ...]:
    place = layout.SECTIONS_AT + number * layout.SECTION_WORDS + layout.SECTION_COUNT
    took = (layout.RINGS_AT + number * layout.RING_ENTRIES, layout.RING_ENTRIES)
    return _endings(words, seconds, place, took, layout.ENDS_AT + number * _ENDS, after)


def _step_endings(
    words: "memoryview[int]", seconds: "memoryview[float]", after: int
) -> tuple[SectionEnd, ...]:
    took = (layout.STEPS_AT, layout.STEPS_ENTRIES)
    endings = _endings(words, seconds, layout.STEPS, took, layout.ENDS_AT, after)
    if words[layout.COUNTED_BY] == layout.BY_SDK:
        return tuple(
            ending if ending.took_s else replace(ending, took_s=None) for ending in endings
        )
    return tuple(replace(ending, took_s=None) for ending in endings)


def _endings(
    words: "memoryview[int]",
    seconds: "memoryview[float]",
    count_at: int,
    took: tuple[int, int],
    ends_at: int,
    after: int,
) -> tuple[SectionEnd, ...]:
    """The ends after `after` that both rings agree on: what is written meanwhile is left out."""
    took_at, entries = took
    count = _count(words, count_at)
    ends = []
    for number in range(max(after, count - entries, 0) + 1, count + 1):
        took_s = _plausible(seconds[took_at + (number & (entries - 1))])
        is_kept = number > count - _ENDS
        ended_s = _plausible(seconds[ends_at + (number & (_ENDS - 1))]) if is_kept else None
        ends.append((number, took_s, ended_s))
    newest = _count(words, count_at) + 1  # it may be written already
    return tuple(
        SectionEnd(number, took_s, ended_s if number > newest - _ENDS else None)
        for number, took_s, ended_s in ends
        if number > newest - entries
    )


def _newest(endings: tuple[SectionEnd, ...], otherwise: int) -> int:
    return endings[-1].number if endings else otherwise


def _times(
    words: "memoryview[int]",
    seconds: "memoryview[float]",
    rings: tuple[int, int, int],
    number: int,
    after: int,
) -> tuple[int, tuple[float, ...]]:
    """How many a ring of this section was given in all, and the latest of them after `after`."""
    counted_at, rings_at, entries = rings
    place = layout.SECTIONS_AT + number * layout.SECTION_WORDS + counted_at
    count = _count(words, place)
    at = rings_at + number * entries
    numbers = range(max(after, count - entries) + 1, count + 1)
    times = [(entry, _plausible(seconds[at + (entry & (entries - 1))])) for entry in numbers]
    kept = _count(words, place) + 1 - entries  # the next one may be written already
    return count, tuple(took_s for entry, took_s in times if entry > kept)


def _one_of(names: Mapping[int, N], word: int, field: str) -> N:
    try:
        return names[word]
    except KeyError:
        raise BadPageError(f"it has a {field} {word}") from None


def _progress_s(words: "memoryview[int]") -> float:
    return max(words[layout.PROGRESS_NS] / 1e9, _plausible(_double(words[layout.PROGRESS_S])))


def _plausible(seconds: float) -> float:
    if 0 <= seconds < _MOST_S:
        return seconds
    raise BadPageError(f"it has a time of {seconds} s")


def _lane(words: "memoryview[int]", at: int) -> LaneReading:
    seconds = words.cast("B").cast("d")
    thread, beat_s = words[at + layout.LANE_THREAD], _plausible(seconds[at + layout.LANE_MOVED_S])
    moved_s = beat_s
    frames: list[OpenSection] = []
    first = at + layout.LANE_FRAMES
    for place in range(first, first + layout.DEEPEST):
        section, since_s = divmod(_plausible(seconds[place]), layout.FRAME_STEP)
        if section == layout.OUTSIDE:
            moved_s = max(moved_s, since_s)
            break
        frames.append(OpenSection(int(section), since_s))
    section_count = _known(words)  # the last: the rank may have named another one meanwhile
    for frame in frames:
        if frame.section >= section_count:
            raise BadPageError(f"a thread is in section {frame.section} of {section_count}")
    if at == layout.LANES_AT:
        moved_s = max(moved_s, _progress_s(words))
    since_s = frames[-1].since_s if frames else 0.0
    return LaneReading(thread, max(moved_s, since_s), beat_s, tuple(frames))


def _text(words: "memoryview[int]", at: int, length: int) -> str:
    octets = b"".join(
        words[place].to_bytes(8, "little", signed=True) for place in range(at, at + length)
    )
    return octets.partition(b"\0")[0].decode(errors="replace")


def _double(bits: int) -> float:
    (value,) = struct.unpack("d", struct.pack("q", bits))
    return float(value)
