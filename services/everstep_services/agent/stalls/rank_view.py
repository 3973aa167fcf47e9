"""What is known about a rank at one moment, from its page and from outside."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field

from trainer_sdk.page_content import LaneReading, PageReading, SectionReading


@dataclass(frozen=True, slots=True)
class ActivitySigns:
    """Signs of work from outside, for a rank whose page shows none."""

    idle_s: float | None = None
    """How long its process has used no processor and moved no bytes; None without a look."""
    collective_s: float | None = None
    """When it was last seen to enter another collective."""
    waits_in: str = ""
    """The collective that it is in; empty if it is in none, or that is not known."""
    is_recorded: bool = False
    """Whether its collectives can be read: then an empty `waits_in` means none."""
    entered_in: Mapping[str, int] = field(default_factory=dict)
    """By process group: the last collective that it has entered, as far as that is known."""
    awaits: tuple[str, int] | None = None
    """The oldest collective that it is in: its group, and its number there; None if not known."""

    @property
    def collective(self) -> str | None:
        """The collective that it is in; empty for none, None if that is not known."""
        return self.waits_in if self.waits_in or self.is_recorded else None


@dataclass(frozen=True, slots=True)
class RankView:
    """Everything known about one rank at one moment."""

    rank: int
    born_s: float
    """When its process was started."""
    page: PageReading | None = None
    lanes: tuple[LaneReading, ...] = ()
    section: Callable[[int], SectionReading] | None = None
    """Reads a section from its page."""
    threads: Collection[int] | None = None
    """Its threads, if they were looked up: sections of threads that are gone never end."""
    signs: ActivitySigns = ActivitySigns()
    looked_s: float = 0.0
    """When the signs were seen."""
    compile_idle_s: float = 0.0
    """For how long its compilation has computed next to nothing."""
    trouble: str = ""
    """Why its page cannot be trusted."""
