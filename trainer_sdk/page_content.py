"""The content of a page at one moment: a rank's phase, steps, open sections and their times."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class RankPhase(StrEnum):
    """The phase of a rank's process."""

    STARTING = "starting"
    SCRIPT = "script"
    ENDED = "ended"
    """The script has returned or raised; the process may still be leaving."""


class CountedBy(StrEnum):
    """What counts the steps of a rank."""

    NOBODY = "nobody"
    OPTIMIZER = "optimizer"
    SDK = "sdk"


class SectionKind(StrEnum):
    """The kind of a section; sections of the last two may take long."""

    PLAIN = "plain"
    CHECKPOINT = "checkpoint"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True)
class PageReading:
    """The content of a page at one moment. Instants are of this host's monotonic clock."""

    pid: int
    round: int
    rank: int
    step: int
    """The last finished step: in this round, or as the script counts; 0 before the first."""
    progress_s: float
    """When the rank last made progress by a step, a heartbeat or a new phase."""
    phase: RankPhase
    script_s: float
    """When the script began; 0 before."""
    first_step_s: float
    """When the first step was finished; 0 before."""
    counted_by: CountedBy
    dropped: int
    """The number of datagrams that could not be sent."""
    steps: int = 0
    """The number of steps finished in this round."""
    longest_step_s: float = 0.0
    """The longest step after the first, without time in long phases."""
    pauses: int = 0
    """The number of open pauses."""
    paused_until_s: float = 0.0
    """When the pauses end by themselves; 0 for never."""
    misuses: int = 0
    """The number of invalid calls of the SDK."""
    total_steps: int = 0
    """The last step of the training; 0 if the script has not reported it."""
    stop_seen_s: float = 0.0
    """When the script first saw that it should stop; 0 before."""
    listens: bool = False
    """Whether the script has ever asked if it should stop."""
    group_timeout_s: float = 0.0
    """The timeout of collectives in the default process group; 0 if unknown."""
    compiling_s: float = 0.0
    """When the present compilation by torch began; 0 if there is none."""
    compiled_s: float = 0.0
    """When the last compilation ended; 0 if there was none."""
    beats: int = 0
    """The number of heartbeats."""
    first_beat_s: float = 0.0
    """When the first heartbeat came; 0 before."""
    longest_beat_s: float = 0.0
    """The longest time between two heartbeats, or between the last one and the first step."""
    warmup: int = 0
    """The number of first steps that may take long; 0 if not given."""
    closed_s: float = 0.0
    """When the session was closed; 0 before."""
    survives: int = 0
    """As `SURVIVES` in the layout."""
    is_numbered: bool = False
    """Whether the script numbers its steps: then those of two rounds can be compared."""
    exit_code: int | None = None
    """The exit code of the script, as far as the script decides it; None while it runs, and if
    it is unknown."""

    @property
    def is_closed(self) -> bool:
        """Whether the session is closed, and has not been used since."""
        return 0 < self.closed_s >= self.progress_s


@dataclass(frozen=True, slots=True)
class OpenSection:
    """A section that a thread is in."""

    section: int
    since_s: float


@dataclass(frozen=True, slots=True)
class LaneReading:
    """The open sections of a thread."""

    thread: int
    """Its id in the kernel."""
    moved_s: float
    """When the thread last entered or left a section, or made other progress."""
    beat_s: float
    """When the thread last made progress outside shown sections, as by a heartbeat."""
    frames: tuple[OpenSection, ...]
    """The open sections, the outermost first; at most 16."""


@dataclass(frozen=True, slots=True)
class SectionReading:
    """The counts and times of a section."""

    name: str
    """Empty for the time outside all sections."""
    kind: SectionKind
    count: int
    """How often the section has ended."""
    longest_s: float
    """The longest time since the first step of the round; 0 if it has not ended since."""
    observed: int
    """How often the section has ended since the first step."""


@dataclass(frozen=True, slots=True)
class SectionEnd:
    """The end of a section, or of a step."""

    number: int
    """Counted from 1, in this round."""
    took_s: float | None
    """None for the first step, and for steps that the optimizer counts."""
    ended_s: float | None
    """None if the end is not among the latest 16."""


@dataclass(frozen=True, slots=True)
class PageNews:
    """The additions to a page since it was read before."""

    steps: tuple[SectionEnd, ...]
    sections: Mapping[int, tuple[SectionEnd, ...]]
    """The new ends of each section, by its number; only sections with new ends."""
    counts: Mapping[int, int]
    """How often each of these sections has ended in all."""
    cpu_s: Mapping[int, tuple[float, ...]]
    """The latest processor times of these sections."""
    cpu_counts: Mapping[int, int]
    """The number of processor times that were written in all."""
    device_s: Mapping[int, tuple[float, ...]]
    """The latest times of these sections on the accelerator."""
    device_counts: Mapping[int, int]
    """The number of times on the accelerator that were written in all."""
    open: tuple[OpenSection, ...]
    """The open sections of the thread that makes the steps, the outermost first."""
