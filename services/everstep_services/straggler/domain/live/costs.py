"""The cost of each finding to the job, window by window, until it is reported."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from everstep_services.straggler.domain.changes import Cost

_TOLD_AFTER = 6
"""Windows: each time the document is written, and all agents of the job read it."""

Finding = tuple[int, bool]
"""A rank, and whether it only stands for its role."""


@dataclass(slots=True)
class Costs:
    """Of one round."""

    round: int
    rates: dict[Finding, float] = field(default_factory=dict)
    """Of each open finding, what it cost a step in the last window in which that was measured."""
    _untold: dict[Finding, tuple[int, Cost]] = field(default_factory=dict)
    """The sums, and over how many windows."""

    def measure(
        self, steps: tuple[int, int], lost_s: Mapping[Finding, float], unknown: Collection[Finding]
    ) -> None:
        """Take in what a window's steps, from first to last, have lost in each step by findings.

        Unknown findings cost as much as when they were last measured; all others are over or new,
        and the cost of a new finding comes with it.
        """
        rates = {
            finding: self.rates[finding] for finding in unknown if finding in self.rates
        } | dict(lost_s)
        for finding, rate in rates.items():
            if finding in self.rates:
                self._add(finding, steps, rate)
        self.rates = rates

    def _add(self, finding: Finding, steps: tuple[int, int], rate: float) -> None:
        first, last = steps
        rank, is_design = finding
        cost = Cost(self.round, rank, is_design, first, last, rate * (last - first + 1))
        windows, before = self._untold.get(finding, (0, None))
        if before is not None:
            cost = replace(cost, first_step=before.first_step, lost_s=before.lost_s + cost.lost_s)
        self._untold[finding] = windows + 1, cost

    def tell(self, *, is_over: bool = False) -> list[Cost]:
        """Return the costs to report: at once for findings that are over, else occasionally."""
        due = [
            finding
            for finding, (windows, _) in self._untold.items()
            if is_over or finding not in self.rates or windows >= _TOLD_AFTER
        ]
        return [self._untold.pop(finding)[1] for finding in due]
