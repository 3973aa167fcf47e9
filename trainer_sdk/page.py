"""The agent's side of a page: reads the state of a rank without its help."""

import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from trainer_sdk import layout
from trainer_sdk.page_content import (
    CountedBy,
    LaneReading,
    OpenSection,
    PageNews,
    PageReading,
    RankPhase,
    SectionEnd,
    SectionKind,
    SectionReading,
)

N = TypeVar("N")


class BadPageError(Exception):
    """A page has content that no rank writes; the text says which."""


class PageView:
    """A mapped page. It can be read at any time, even when its rank is dead.

    Each method that reads raises BadPageError if the page has content that no rank writes.
    """

    def __init__(self, mapped: mmap.mmap) -> None:
        self._mapped = mapped
        self._names: dict[int, str] = {}

    def read(self) -> PageReading | None:
        """The present content; None until the rank has opened the page."""
        with self._words() as words:
            magic = words[layout.MAGIC_AT]
            if magic not in (0, layout.MAGIC):
                raise BadPageError(f"it begins with {magic:#x}")
            return _reading(words) if magic else None

    def lanes(self) -> tuple[LaneReading, ...]:
        """The open sections of each thread; the thread that makes the steps comes first."""
        with self._words() as words:
            starts = range(layout.LANES_AT, _LANES_END, layout.LANE_WORDS)
            return tuple(_lane(words, at) for at in starts if words[at + layout.LANE_THREAD])

    def section(self, number: int) -> SectionReading:
        """The counts and times of a section."""
        with self._words() as words:
            if not 0 <= number < _known(words):
                raise BadPageError(f"it has no section {number}")
            return self._section(words, number)

    def sections(self) -> tuple[SectionReading, ...]:
        """Every section that the rank has named."""
        with self._words() as words:
            return tuple(self._section(words, number) for number in range(_known(words)))

    def durations(self, number: int, after: int) -> tuple[float, ...]:
        """The latest durations of a section, without its first `after` ends."""
        with self._words() as words:
            if not 0 <= number < _known(words):
                raise BadPageError(f"it has no section {number}")
            count = words[layout.SECTIONS_AT + number * layout.SECTION_WORDS]
            seconds = words.cast("B").cast("d")
            at = layout.RINGS_AT + number * layout.RING_ENTRIES
            first = max(after, count - layout.RING_ENTRIES)
            places = (at + (end & (layout.RING_ENTRIES - 1)) for end in range(first + 1, count + 1))
            return tuple(_plausible(seconds[place]) for place in places)

    def step_durations(self, most: int = layout.RING_ENTRIES) -> tuple[float, ...]:
        """The durations of at most that many latest steps, without time in long phases."""
        with self._words() as words:
            steps = words[layout.STEPS]
            most = min(most, layout.STEPS_ENTRIES)
            first = max(1, steps - most)  # the first step has no beginning
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
        """The ends after these counts of steps, ends, processor times and times on the accelerator.

        Steps are read last: if a section ended after a step, that step is in the result, too.
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
        """The latest value of each metric, by name; only those reported after `after_ns`.

        `after_ns` is an instant of this host's monotonic clock.
        """
        with self._words() as words:
            starts = [at for at in _values(words) if words[at + 5] > after_ns]
            return {_text(words, at, _VALUE_NAME_WORDS): _double(words[at + 4]) for at in starts}

    def reported_ns(self, otherwise: int = -1) -> int:
        """When the script last reported a metric."""
        with self._words() as words:
            return max((words[at + 5] for at in _values(words)), default=otherwise)

    def ask_to_stop(self, after_step: int) -> None:
        """Tell the rank to stop once it has finished this step."""
        with self._words() as words:
            words[layout.STOP_AFTER] = after_step + 1

    def ask_to_save(self, after_step: int) -> None:
        """Tell the rank to save once it has finished this step, and to go on."""
        with self._words() as words:
            words[layout.SAVE_AFTER] = after_step + 1

    def give_warmup(self, steps: int) -> None:
        """Tell the rank the number of first steps that may take long."""
        with self._words() as words:
            words[layout.WARMUP_GIVEN] = steps

    def close(self) -> None:
        """Unmap the page."""
        self._mapped.close()

    def _words(self) -> "memoryview[int]":
        size = self._mapped.size()
        if size < layout.PAGE_BYTES:  # an access beyond the end of the file would kill this process
            raise BadPageError(f"it was cut to {size} bytes")
        return memoryview(self._mapped).cast("q")

    def _section(self, words: "memoryview[int]", number: int) -> SectionReading:
        name = self._names.get(number)
        if name is None:
            at = layout.NAMES_AT + number * layout.NAME_WORDS
            name = self._names[number] = _text(words, at, layout.NAME_WORDS)
        at = layout.SECTIONS_AT + number * layout.SECTION_WORDS
        before = words[at + layout.SECTION_BEFORE]  # read first: it never passes the count
        count = words[at + layout.SECTION_COUNT]
        longest_s = _plausible(_double(words[at + layout.SECTION_LONGEST_S]))
        if not 0 <= before <= count:
            raise BadPageError(f"section {name!r} ended {count} times, {before} before it learned")
        return SectionReading(
            name=name,
            kind=_member(_KINDS, words[at + layout.SECTION_KIND], "kind"),
            count=count,
            longest_s=longest_s,
            observed=count - before,
        )


def view_page(path: str) -> PageView:
    """The page that a rank has made itself; ValueError if the file is too short."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        return PageView(mmap.mmap(descriptor, layout.PAGE_BYTES))
    finally:
        os.close(descriptor)


def make_page(path: str) -> PageView:
    """Make an empty page for a rank that is about to start; only its owner may read it."""
    with suppress(FileNotFoundError):
        os.unlink(path)  # a rank of an earlier round that still lives keeps its page
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # Allocate all of it now: if memory is short, this call fails, and not a rank that writes.
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
    layout.EXIT_CODE,
)
_MOST = {
    layout.PID: 1 << 22,  # Linux has none above
    **dict.fromkeys(
        (layout.ROUND, layout.RANK, layout.STEP, layout.STEPS, layout.TOTAL_STEPS), 2**53 - 1
    ),
}
"""What passes these ends the watch of a process, or is refused as a fact."""
_ENDS = layout.ENDS_ENTRIES
_CPU = (layout.SECTION_CPU_COUNT, layout.CPU_AT, layout.CPU_ENTRIES)
_DEVICE = (layout.SECTION_DEVICE_COUNT, layout.DEVICE_AT, layout.DEVICE_ENTRIES)
_LANES_END = layout.LANES_AT + layout.LANES * layout.LANE_WORDS
_SECTIONS_END = layout.SECTIONS_AT + layout.SECTIONS_MOST * layout.SECTION_WORDS
_VALUE_NAME_WORDS = layout.VALUE_NAME_BYTES // 8
_MOST_S = layout.SECTIONS_MOST * layout.FRAME_STEP


def _values(words: "memoryview[int]") -> Iterable[int]:
    """The offset of each metric."""
    count = words[layout.VALUES]
    if not 0 <= count <= layout.VALUES_MOST:
        raise BadPageError(f"it has {count} values")
    return (layout.VALUES_AT + number * layout.VALUE_WORDS for number in range(count))


def _reading(words: "memoryview[int]") -> PageReading:
    for place in _NEVER_NEGATIVE:
        if words[place] < 0:
            raise BadPageError(f"its word {place} is {words[place]}")
    for place, most in _MOST.items():
        if words[place] > most:
            raise BadPageError(f"its word {place} is {words[place]}")
    return PageReading(
        pid=words[layout.PID],
        round=words[layout.ROUND],
        rank=words[layout.RANK],
        step=words[layout.STEP],
        progress_s=_progress_s(words),
        phase=_member(_PHASES, words[layout.PHASE], "phase"),
        script_s=words[layout.SCRIPT_NS] / 1e9,
        first_step_s=words[layout.FIRST_STEP_NS] / 1e9,
        counted_by=_member(_COUNTERS, words[layout.COUNTED_BY], "counter of steps"),
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
        is_numbered=words[layout.NUMBERED] == 1,
        survives=words[layout.SURVIVES] if words[layout.SURVIVES] in {1, 2} else 0,
        exit_code=words[layout.EXIT_CODE] - 1 if words[layout.EXIT_CODE] else None,
        closed_s=_plausible(_double(words[layout.CLOSED_S])),
        compiled_s=words[layout.COMPILED_NS] / 1e9,  # read last: it is written first
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
    """The ends after `after`, without entries that the rank may have overwritten meanwhile."""
    took_at, entries = took
    count = _count(words, count_at)
    ends = []
    for number in range(max(after, count - entries, 0) + 1, count + 1):
        took_s = _plausible(seconds[took_at + (number & (entries - 1))])
        is_kept = number > count - _ENDS
        ended_s = _plausible(seconds[ends_at + (number & (_ENDS - 1))]) if is_kept else None
        ends.append((number, took_s, ended_s))
    newest = _count(words, count_at) + 1  # the next entry may be written already
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
    """The total number of times in a section's ring, and the latest of them after `after`."""
    counted_at, rings_at, entries = rings
    place = layout.SECTIONS_AT + number * layout.SECTION_WORDS + counted_at
    count = _count(words, place)
    at = rings_at + number * entries
    numbers = range(max(after, count - entries) + 1, count + 1)
    times = [(entry, _plausible(seconds[at + (entry & (entries - 1))])) for entry in numbers]
    kept = _count(words, place) + 1 - entries  # the next entry may be written already
    return count, tuple(took_s for entry, took_s in times if entry > kept)


def _member(names: Mapping[int, N], word: int, field: str) -> N:
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
    section_count = _known(words)  # read last: the rank may have added a section meanwhile
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
