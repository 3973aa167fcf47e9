"""Where the job is, as far as this agent knows: what all connections go by."""

from dataclasses import dataclass

from everstep.messages import StartRanks
from everstep_services.agent.replicas.protocol import Hello
from everstep_services.agent.replicas.settings import CheckpointSettings
from everstep_services.agent.replicas.tls import Tls

_GRACE_S = 10.0


@dataclass(slots=True)
class ReplicaSession:
    """Changed on the loop's thread; others read single fields."""

    job: str
    node: str
    settings: CheckpointSettings
    order: StartRanks | None = None
    """The newest that this agent had."""
    tls: Tls | None = None
    """What agents speak with each other; None for plain TCP."""

    @property
    def key(self) -> bytes:
        """Nobody is let in without one."""
        return b"" if self.order is None else self.order.replica_key.encode()

    @property
    def round(self) -> int:
        """The newest round whose ranks were started here."""
        return 0 if self.order is None else self.order.round

    def slot_of(self, rank: int) -> tuple[int, int] | None:
        """The slot of one of this node's own ranks, and how many it has."""
        order = self.order
        if order is None or not order.first_rank <= rank < order.first_rank + order.ranks:
            return None
        return order.slot, order.ranks

    def hello(self) -> Hello:
        """Who we are."""
        return Hello(job=self.job, node=self.node, round=self.round)

    def limit_s(self, size_bytes: int) -> float:
        """How long so many bytes may take."""
        return _GRACE_S + size_bytes / (self.settings.least_mib_s * (1 << 20))
