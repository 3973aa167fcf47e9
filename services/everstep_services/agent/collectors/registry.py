"""Which kinds of evidence an agent collects: those of ranks, and those of the node."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from everstep_services.agent.collectors.collection import Collector
from everstep_services.agent.collectors.environment import environment
from everstep_services.agent.collectors.flight_recorder import flight_recorders, split_sizes
from everstep_services.agent.collectors.gpu import gpus
from everstep_services.agent.collectors.nccl_ras import nccl_status
from everstep_services.agent.collectors.node_state import NodeState
from everstep_services.agent.collectors.rank_state import pages, processes
from everstep_services.agent.collectors.stacks import StacksReader, written_stacks
from everstep_services.agent.settings import Kind


@dataclass(frozen=True, slots=True)
class Collectors:
    """The wanted kinds, by name."""

    of_ranks: Mapping[str, Collector]
    """Kinds that need living processes: every restart waits for them."""
    of_node: Mapping[str, Collector]
    """Kinds that may take longer than the ranks have."""
    of_past: Mapping[str, Collector]
    """Kinds that say the same after the ranks have ended: they wait until the next ranks run."""
    of_ended: Mapping[str, Collector]
    """What ranks leave as they are ended, where the time was too short for the kind before."""

    @property
    def of_living(self) -> Mapping[str, Collector]:
        """All kinds that can be collected while the ranks run."""
        return {**self.of_ranks, **self.of_node, **self.of_past}


def collectors(without: Collection[str] = (), *, native_stacks: bool = False) -> Collectors:
    """All kinds but these."""
    node = NodeState()
    of_ranks: Mapping[Kind, Collector] = {
        "page": pages,
        "process": processes,
        "flight_recorder": flight_recorders,
        "nccl_ras": nccl_status,
        "stacks": StacksReader(native=native_stacks).stacks,
    }
    of_node: Mapping[Kind, Collector] = {"gpu": gpus, "cgroup": node.cgroup}
    of_past: Mapping[Kind, Collector] = {"kernel_log": node.kernel_log, "environment": environment}
    of_ended: Mapping[Kind, Collector] = {"stacks": written_stacks, "split_sizes": split_sizes}
    chosen: list[dict[str, Collector]] = [
        {kind: collector for kind, collector in kinds.items() if kind not in without}
        for kinds in (of_ranks, of_node, of_past, of_ended)
    ]
    return Collectors(*chosen)
