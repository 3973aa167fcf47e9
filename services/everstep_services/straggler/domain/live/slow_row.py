"""A slow row next to the rows that it is compared with."""

from dataclasses import dataclass

import numpy as np

from everstep.messages import Score
from everstep_services.straggler.domain.arrays import finite_median
from everstep_services.straggler.domain.live.measures import Measured
from everstep_services.straggler.domain.operations import Array, cause_of

_MOST_PEERS = 2048
EXPLAINS = 0.5
"""A signal is the cause if it explains this share of the excess."""


@dataclass(frozen=True, slots=True)
class SlowSignal:
    """One measure of a rank and of its peers, in seconds a step where it is a time."""

    name: str
    value: float
    usual: float

    @property
    def excess(self) -> float:
        return self.value - self.usual if np.isfinite(self.value - self.usual) else 0.0

    def score(self) -> Score:
        ratio = self.usual / self.value if self.value > 0 else None
        return Score(
            signal=self.name[:512], relative_score=ratio, value_s=self.value, reference_s=self.usual
        )

    def shown(self) -> str:
        return f"{self.value * 1e3:.1f} ms a step against {self.usual * 1e3:.1f} ms"


@dataclass(frozen=True, slots=True)
class SlowRow:
    """A slow row and the rows that it is compared with."""

    measured: Measured
    row: int
    peers: Array
    lost_s: float

    def per_step(self, name: str, shown: str = "") -> SlowSignal:
        """A time of the operating system."""
        return self._signal(shown or name.removesuffix("_s"), self.measured.per_step(name))

    def plain(self, name: str) -> SlowSignal:
        return self._signal(name, self.measured.signal(name))

    def _signal(self, name: str, values: Array) -> SlowSignal:
        return SlowSignal(name, float(values[self.row]), finite_median(values[self.peers]))

    def sections(self) -> list[SlowSignal]:
        """Own times of sections, the largest excess first; of two equal ones the shorter."""
        return self._by_section(self.measured.own_sections_s)

    def device_sections(self) -> list[SlowSignal]:
        """The same on the device."""
        return self._by_section(self.measured.own_device_s)

    def _by_section(self, times: Array) -> list[SlowSignal]:
        signals = [
            self._signal(name, times[:, column])
            for column, name in enumerate(self.measured.sections.names)
            if name
        ]
        return sorted(
            signals, key=lambda signal: (-round(signal.excess / self.lost_s, 1), signal.value)
        )

    def is_input(self) -> bool:
        """Whether a section that reads data explains the excess."""
        section = next(iter(self.sections()), None)
        is_large = section is not None and section.excess > EXPLAINS * self.lost_s
        return section is not None and is_large and cause_of(section.name) == "input"

    def steal(self) -> SlowSignal:
        """What the hypervisor took from the node, for each of its ranks."""
        sample = self.measured.sample
        counts = np.maximum(np.bincount(sample.node, minlength=len(sample.nodes)), 1)
        by_node = np.array([node.steal_s for node in sample.nodes]) / counts
        return self._signal("steal", by_node[sample.node] / np.maximum(sample.steps, 1))


def peers_of(measured: Measured, row: int, is_usual: Array | None = None) -> Array:
    """Return the other rows of its role with a known own time; a sample of very many."""
    same = (measured.role == measured.role[row]) & np.isfinite(measured.own_s)
    same[row] = False
    if is_usual is not None and (same & is_usual).any():
        same &= is_usual
    peers = np.flatnonzero(same)
    return peers[:: max(1, len(peers) // _MOST_PEERS)]
