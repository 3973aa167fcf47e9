"""The [straggler] section: how slow ranks are detected, and what is done about them."""

from typing import Any

from everstep.settings import Settings
from everstep.slow_rank_causes import CURABLE, OF_NODE
from everstep_services.straggler.domain.switches import SETTINGS, StragglerSwitches


class StragglerSettings(Settings, frozen=True, kw_only=True):
    """How slow ranks are found, and what follows.

    Most are switches, too, such as `straggler.window_s`: for all jobs or for one, while it runs.
    """

    timings: bool = True
    """Agents send timings; without them no slow rank is found."""
    cpu: bool = True
    """The SDK measures the processor time of sections, too."""
    window_s: float = 10.0
    """The approximate length of a window: agents send one message for each window, and a finding
    needs at least three."""
    window_steps: int = 0
    """The steps of a window, no matter how long they take; 0 to use `window_s`."""
    slower_ratio: float = 0.03
    """A rank is slow from this excess over the median of its role group on: 0.03 is 3 %. The limit
    is higher if windows are noisy. The rank is cleared below half of the limit."""
    stop_below: float = 0.7
    """A job is stopped if the score of a slow rank, which is 1 / (1 + its excess), is below this …
    """
    stop_reports: int = 10
    """… in this many windows in a row. It is only observed unless `modes.stop` is `enforce`."""
    exclude_after_s: float = 900.0
    """A node is replaced if its rank is slow for this long …"""
    exclude_confidence: float = 0.7
    """… if the finding has at least this confidence …"""
    exclude_causes: tuple[str, ...] = OF_NODE
    """… and one of these causes: of `host`, `device`, `network`, `compute` and `unknown` any.
    Unless `modes.exclude` is `enforce`, this is only recorded.
    """
    drain_within_s: float = 60.0
    """How much time the job has to save before the node is replaced."""
    grace_s: float = 5.0
    """How long a window waits for nodes that have not sent theirs, once the others have."""
    tick_s: float = 0.25
    """How often windows are judged, and changed documents written."""
    report_every_s: float = 60.0
    """How often the best and worst ranks of each job are logged; 0 for never."""
    report_ranks: int = 5
    """How many of the best and of the worst ranks are logged."""
    forget_after_s: float = 6 * 3600.0
    """A job that has sent no data for this long is forgotten, and so are its slow ranks."""
    takeover_s: float = 30.0
    """Facts that another replica has decided but not recorded for this long are recorded here."""
    inbox_windows: int = 16_384
    """Messages of agents that may wait to be read; beyond it the oldest are dropped: a gap."""

    def __post_init__(self) -> None:
        self._above_zero(
            "window_s exclude_after_s drain_within_s grace_s forget_after_s tick_s takeover_s "
            "slower_ratio"
        )
        self._at_least(1, "stop_reports report_ranks inbox_windows")
        if not 0 < self.stop_below < 1:
            raise ValueError(f"stop_below must be between 0 and 1, got {self.stop_below:g}")
        self._not_negative("report_every_s window_steps")
        self._check_exclusions()

    def _check_exclusions(self) -> None:
        if not 0 < self.exclude_confidence <= 1:
            value = f"{self.exclude_confidence:g}"
            raise ValueError(f"exclude_confidence must be above 0 and at most 1, got {value}")
        if not set(self.exclude_causes) <= set(CURABLE):
            value = ", ".join(self.exclude_causes)
            raise ValueError(f"exclude_causes may be {', '.join(CURABLE)}, got {value}")


def defaults(settings: StragglerSettings) -> StragglerSwitches:
    """The switches of a job for which nobody has set any."""
    values: dict[str, Any] = {
        field: getattr(settings, name.removeprefix("straggler."))
        for name, field in SETTINGS.items()
    }
    return StragglerSwitches(**values)
