"""What health knows of one node."""

from copy import copy
from dataclasses import dataclass
from math import inf

from msgspec.structs import force_setattr

from everstep.messages import NodeBeat
from everstep_services.health.domain.connection_probe import ConnectionProbe
from everstep_services.health.domain.findings import NodeLoss
from everstep_services.health.domain.round_progress import done, last_step, youngest_s

_AT_WORK = frozenset({"starting", "running"})


@dataclass(slots=True)
class HeardNode:
    """What health knows of a node by its last beat and since."""

    beat: NodeBeat
    """The last beat, without its ranks: they would be most of what health keeps."""
    seen_s: float
    """When that beat was heard, by the observer's clock."""
    heard_at: float
    """The same time by its monotonic clock."""
    done: int = 0
    """What the running ranks had finished by that beat; 0 if their ages tell their progress."""
    last_step: int | None = None
    """The last step that all ranks had finished by that beat."""
    is_over: bool = False
    """The node's job has ended: its silence is expected."""
    hails: tuple[float, ...] = ()
    """When the node was hailed since that beat, by the monotonic clock."""
    probe: ConnectionProbe | None = None
    """The probes of the node's connection since that beat; None before the first."""
    inquired_s: float = -inf
    """When other agents were last asked whether the node's warden lives."""
    first_inquired_s: float = inf
    """When they were first asked since the last beat."""
    alive_s: float = -inf
    """When the node's warden last answered another agent."""
    loss: NodeLoss | None = None
    """The finding, once the node is lost."""

    def hear(self, beat: NodeBeat, seen_s: float, now: float) -> float:
        """Keep a beat; return how long ago a rank made progress, infinite if the beat tells not."""
        age_s, finished = youngest_s(beat), 0
        if age_s == inf:
            finished = done(beat)
            if finished and finished != self.done and self.beat.round == beat.round:
                age_s = 0.0
        self.beat = copy(beat)
        force_setattr(self.beat, "ranks", ())
        self.seen_s, self.heard_at = seen_s, now
        self.done, self.last_step = finished, last_step(beat)
        self.hails, self.probe, self.first_inquired_s = (), None, inf
        return age_s

    @property
    def is_at_work(self) -> bool:
        """The node's ranks run or start, and other agents can reach its warden."""
        beat = self.beat
        return beat.warden is not None and beat.slot is not None and beat.state in _AT_WORK
