"""Takes the page of one rank apart into windows of steps."""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from everstep.messages import SectionTiming, Sketch
from everstep.messages.beats.sketch import bucket_of
from trainer_sdk.page import PageView
from trainer_sdk.page_content import SectionEnd

SHORTEST_S = 0.5
"""No window is shorter: it has enough steps to last this long."""
_LONGEST_STEPS = 1 << 40
_KEPT = 1024
"""The stretches and steps that are remembered, to find the section of an instant."""


def steps_of(window_steps: int, step_s: float | None) -> int:
    """The number of steps of a window: a power of two times the wanted number."""
    steps = max(1, window_steps)
    if step_s is None or step_s <= 0:
        return steps
    while steps * step_s < SHORTEST_S and steps < _LONGEST_STEPS:
        steps *= 2
    return steps


@dataclass(frozen=True, slots=True)
class StepRange:
    """The steps of a window, from 1 in the round."""

    first: int
    last: int

    @property
    def count(self) -> int:
        """The number of steps."""
        return self.last - self.first + 1

    def after(self, size: int) -> "StepRange":
        """The next ones, up to a multiple of the size."""
        return StepRange(self.last + 1, (self.last // size + 1) * size)

    def is_whole(self, size: int) -> bool:
        """Whether it has the size, and begins after a multiple of it."""
        return self.count == size and self.last % size == 0


@dataclass(slots=True)
class SketchBuilder:
    """A sketch that grows."""

    count: int = 0
    sum_s: float = 0.0
    min_s: float = 0.0
    max_s: float = 0.0
    buckets: Counter[int] = field(default_factory=Counter)

    def add(self, duration_s: float) -> None:
        """Add a value."""
        self.min_s = duration_s if not self.count else min(self.min_s, duration_s)
        self.max_s = max(self.max_s, duration_s)
        self.count += 1
        self.sum_s += duration_s
        self.buckets[bucket_of(duration_s)] += 1

    def sketch(self) -> Sketch:
        """The sketch now."""
        return Sketch(
            count=self.count,
            sum_s=round(self.sum_s, 9),
            min_s=round(self.min_s, 9),
            max_s=round(self.max_s, 9),
            buckets=tuple(sorted(self.buckets.items())),
        )


@dataclass(slots=True)
class _Tally:
    """The sums of one window so far."""

    steps: SketchBuilder = field(default_factory=SketchBuilder)
    wall: dict[int, SketchBuilder] = field(default_factory=dict)
    cpu: dict[int, SketchBuilder] = field(default_factory=dict)
    device: dict[int, SketchBuilder] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stretch:
    """The time that a rank was in a section, by the host's monotonic clock."""

    section: int
    since_s: float
    until_s: float = float("inf")


@dataclass(frozen=True, slots=True)
class Closed:
    """The contents of a rank's page for one window."""

    steps: int
    window_s: float
    ends_s: float
    """When the window ended, by the host's monotonic clock."""
    starts_s: float
    sections: tuple[SectionTiming, ...]
    """The whole step first."""
    numbers: tuple[int, ...]
    """The number of each section on the page."""
    stretches: tuple[Stretch, ...]
    """The latest stretches, for the instants of collectives."""


class RankPage:
    """The page of one rank in one round, and the parts of its rings that were read."""

    def __init__(self) -> None:
        self.steps = 0
        """The number of steps that it had finished at the last reading."""
        self._read_s = 0.0
        self._counts: dict[int, int] = {}
        self._cpu_counts: dict[int, int] = {}
        self._device_counts: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._window = _Tally()
        self._next = _Tally()
        self._stretches: deque[Stretch] = deque(maxlen=_KEPT)
        self._open: tuple[Stretch, ...] = ()
        self._ends: dict[int, float] = {}

    def take(self, view: PageView, last: int, now: float) -> None:
        """Read what is new; everything after step `last` belongs to the next window."""
        taken = view.take(self.steps, self._counts, self._cpu_counts, self._device_counts)
        self._take_steps(taken.steps, last, now)
        boundary_s = self._ends.get(last, float("inf"))
        self._counts |= taken.counts
        self._cpu_counts |= taken.cpu_counts
        self._device_counts |= taken.device_counts
        for number, endings in taken.sections.items():
            if number not in self._names:
                self._names[number] = view.section(number).name
            self._take_section(number, endings, boundary_s)
            if endings:
                # these have no instants: they belong to the window of the section's last end
                tally = self._tally(endings[-1], boundary_s)
                _add(tally.cpu, number, taken.cpu_s[number])
                _add(tally.device, number, taken.device_s[number])
        self._open = tuple(Stretch(frame.section, frame.since_s) for frame in taken.open)

    def restart(self) -> None:
        """Begin another window, and forget everything before."""
        self._window, self._next = _Tally(), _Tally()

    def close(self, window: StepRange) -> Closed:
        """Close the window of these steps; the next one begins."""
        steps = self._window.steps
        ends_s = self._ends.get(window.last, self._read_s)
        starts_s = self._ends.get(window.first - 1, ends_s - steps.sum_s)
        for step in [step for step in self._ends if step < window.last]:
            del self._ends[step]
        whole = SectionTiming(section="", wall=steps.sketch())
        return self._close(window, starts_s, ends_s, whole)

    def close_at(self, window: StepRange, starts_s: float) -> Closed:
        """Close a window of some seconds, in which no step was counted."""
        return self._close(window, starts_s, starts_s + window.count)

    def _close(
        self, window: StepRange, starts_s: float, ends_s: float, *whole: SectionTiming
    ) -> Closed:
        tally, self._window, self._next = self._window, self._next, _Tally()
        numbers = sorted(number for number in tally.wall if number in self._names)
        timings = [
            SectionTiming(
                section=self._names[number],
                wall=tally.wall[number].sketch(),
                cpu=tally.cpu[number].sketch() if number in tally.cpu else None,
                device=tally.device[number].sketch() if number in tally.device else None,
            )
            for number in numbers
        ]
        return Closed(
            steps=window.count,
            window_s=max(0.0, ends_s - starts_s),
            ends_s=ends_s,
            starts_s=starts_s,
            sections=(*whole, *timings),
            numbers=(*(0 for _ in whole), *numbers),
            stretches=(*self._stretches, *self._open),
        )

    def _take_steps(self, endings: tuple[SectionEnd, ...], last: int, now: float) -> None:
        before, before_s = self.steps, self._read_s
        for ending in endings:
            ended_s, previous_s = ending.ended_s, self._ends.get(ending.number - 1)
            took_s = ending.took_s
            if took_s is None and ended_s is not None and previous_s is not None:
                took_s = max(0.0, ended_s - previous_s)
            if took_s is not None:
                tally = self._window if ending.number <= last else self._next
                tally.steps.add(took_s)
            if ended_s is not None:
                self._ends[ending.number] = ended_s
        if endings:
            self.steps = endings[-1].number
        if before < last <= self.steps and last not in self._ends:
            # so fast that its instant is no longer on the page: approximately there
            part = (last - before) / (self.steps - before)
            self._ends[last] = before_s + part * (now - before_s) if before_s else now
        self._read_s = now
        self._forget_ends()

    def _forget_ends(self) -> None:
        if len(self._ends) > _KEPT:
            for step in sorted(self._ends)[:-_KEPT]:
                del self._ends[step]

    def _take_section(self, number: int, endings: Iterable[SectionEnd], boundary_s: float) -> None:
        for ending in endings:
            took_s = ending.took_s or 0.0
            tally = self._tally(ending, boundary_s)
            tally.wall.setdefault(number, SketchBuilder()).add(took_s)
            if ending.ended_s is not None:
                self._stretches.append(Stretch(number, ending.ended_s - took_s, ending.ended_s))

    def _tally(self, ending: SectionEnd, boundary_s: float) -> _Tally:
        is_next = ending.ended_s is not None and ending.ended_s > boundary_s
        return self._next if is_next else self._window


def _add(sketches: dict[int, SketchBuilder], number: int, times: Iterable[float]) -> None:
    for took_s in times:
        sketches.setdefault(number, SketchBuilder()).add(took_s)


def section_at(stretches: Iterable[Stretch], at_s: float) -> int | None:
    """The innermost section of a rank at that instant; None outside all sections."""
    around = [stretche for stretche in stretches if stretche.since_s <= at_s <= stretche.until_s]
    return max(around, key=lambda stretch: stretch.since_s).section if around else None
