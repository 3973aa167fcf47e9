"""The round and the key that all connections about states use."""

from dataclasses import dataclass

from everstep.messages import StartRanks
from everstep_services.agent.replicas.settings import CheckpointSettings
from everstep_services.agent.replicas.transfer.protocol import Hello
from everstep_services.agent.replicas.transfer.tls import Tls

_GRACE_S = 10.0


@dataclass(slots=True)
class TransferContext:
    """Changed on the loop's thread; others read single fields."""

    job: str
    node: str
    settings: CheckpointSettings
    order: StartRanks | None = None
    """The newest order of this agent."""
    tls: Tls | None = None
    """How agents encrypt their connections; None for plain TCP."""

    def begins(self, order: StartRanks) -> None:
        """The ranks of a round are about to be started."""
        self.order = order

    @property
    def key(self) -> bytes:
        """The key that every caller must prove to have."""
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
        """The first message of a call."""
        return Hello(job=self.job, node=self.node, round=self.round)

    def limit_s(self, size_bytes: int) -> float:
        """How long the transfer of this many bytes may take."""
        return _GRACE_S + size_bytes / (self.settings.least_mib_s * (1 << 20))
