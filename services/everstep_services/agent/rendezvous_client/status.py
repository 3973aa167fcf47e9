"""The questions to rendezvous, made from the state of the agent: `join`, `report`, `leave`."""

import errno
import random
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from everstep import __version__
from everstep.errors import EverstepError
from everstep.messages import Join, Leave, NetworkFigures, Report, SaveParked, StartRanks
from everstep.messages.base import shared
from everstep.messages.orders import GroupPosition
from everstep_services.agent.core.actions import ExitAgent, SendReport
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.probes.node_checks import NodeChecks
from everstep_services.agent.probes.periodic.probes import PeriodicProbes
from everstep_services.agent.replicas.node_checkpoints import NodeCheckpoints
from everstep_services.agent.run_plan import RunPlan
from everstep_services.agent.stalls.collectives import DEFAULT_GROUP
from everstep_services.agent.telemetry.progress import ProgressReader

_RANGE = (15_000, 32_000)
_ATTEMPTS = 200
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class NoPortError(EverstepError):
    """No port is free in the range where ranks may meet."""

    def __init__(self, low: int, high: int) -> None:
        super().__init__(
            f"no TCP port from {low} to {high} was free in {_ATTEMPTS} attempts: "
            f"find out what holds them with `ss -ltnp`"
        )


class Reserved:
    """A port that no other process can take; free it just before the ranks use it."""

    def __init__(self) -> None:
        low, high = _range()
        for _ in range(_ATTEMPTS):
            # below the kernel's own range: no outgoing connection takes it
            self.port = random.randrange(low, high)  # noqa: S311  no secret
            self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            try:
                self._socket.bind(("", self.port))
            except OSError as error:
                self._socket.close()
                if error.errno not in {errno.EADDRINUSE, errno.EACCES}:
                    raise
            else:
                return
        raise NoPortError(low, high)

    def free(self) -> None:
        """Let others bind the port. Safe to repeat."""
        self._socket.close()


def _range() -> tuple[int, int]:
    low, high = _RANGE
    try:
        ephemeral = int(_EPHEMERAL.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return low, high
    return (low, min(high, ephemeral)) if ephemeral > low + _ATTEMPTS else (low, high)


class RendezvousPort:
    """The port of this node at which the ranks would meet, kept free for them."""

    def __init__(self) -> None:
        self._reserved: Reserved | None = None

    def reserve(self) -> int:
        """Return the port that is kept free, another one if the last was given to ranks."""
        if self._reserved is None:
            self._reserved = Reserved()
        return self._reserved.port

    def release(self, order: StartRanks | SaveParked) -> None:
        """Let the ranks of this order bind it, if they meet on this node."""
        if self._reserved is not None and order.first_rank == 0:
            self._reserved.free()
            self._reserved = None


@dataclass(slots=True)
class StartStopTimes:
    """How the last starts and stops of ranks went."""

    is_warm: bool = False
    """Whether the forge is ready."""
    evidence_s: float = 0.0
    """How long evidence was collected before the last round's ranks were stopped."""
    stop_s: float = 0.0
    """How long the last round's ranks took to stop."""


@dataclass(eq=False, repr=False)
class AgentStatus:
    """Makes the questions to rendezvous; each tells the state at the moment of asking."""

    _plan: RunPlan
    _instance: str
    _agent: Agent
    _progress: ProgressReader
    _checks: NodeChecks
    _probes: PeriodicProbes
    _checkpoints: NodeCheckpoints
    _network: Callable[[], NetworkFigures | None]
    _ranks: StartStopTimes
    _port: RendezvousPort

    def join(self) -> Join:
        """Ask rendezvous for a place in the job."""
        plan, agent = self._plan, self._agent
        return Join(
            job=plan.job,
            node=plan.node,
            instance=self._instance,
            spec=plan.spec,
            allocation=plan.allocation,
            address=plan.address,
            ranks=plan.ranks_per_node,
            scheduler=plan.scheduler.name,
            scheduler_job=plan.scheduler.job,
            attempt=plan.scheduler.attempt,
            infra_rank=plan.infra_rank,
            failure_domain=plan.domain,
            topology=plan.topology,
            group=plan.group,
            nvlink_domain=self._checks.nvlink_domain,
            last_round=agent.last_round,
            last_slot=agent.last_slot if agent.order is None else agent.order.slot,
            last_step=self._progress.last_step(),
            checks=(*self._checks.failing, *self._probes.failing),
            warm=self._ranks.is_warm,
            known_round=agent.round or 0,
            running=agent.order,
            running_state=agent.running_state,
            master_port=self._port.reserve(),
            replica_port=self._checkpoints.port,
            evidence_s=self._ranks.evidence_s,
            stop_s=self._ranks.stop_s,
            version=__version__,
            network=self._network(),
            unsaved=agent.unsaved,
        )

    def _step(self, tell: SendReport) -> int | None:
        """The step of a report: the last one, unless the event has one of its own.

        A first step that the script has not numbered cannot be compared with earlier rounds.
        """
        if tell.event == "first_step":
            is_numbered = tell.rank is not None and self._progress.is_numbered(tell.rank)
            return tell.step if is_numbered else None
        return tell.step if tell.event == "reached" else self._progress.last_step()

    def report(self, tell: SendReport, slot: int, fact: str | None) -> Report:
        """Report an event, and ask for its meaning for the round."""
        ending, age_s = tell.exit, tell.last_progress_age_s
        own = {
            "fact": fact,
            "step": self._step(tell),
            "fingerprint": tell.fingerprint if ending is None else ending.fingerprint,
            "last_progress_age_s": self._progress.age_s() if age_s is None else age_s,
            "entered_in": tuple(
                GroupPosition(group=group, entered=number)
                for group, number in tell.entered_in.items()
            ),
        }
        return Report(
            **{**shared(Report, tell), **own},
            job=self._plan.job,
            node=self._plan.node,
            instance=self._instance,
            slot=slot,
            exit_code=None if ending is None else ending.code,
            is_of_code=ending is not None and ending.is_of_code,
            asks="" if ending is None else ending.asks,
            entered=tell.entered_in.get(DEFAULT_GROUP),
            warm_ranks=self._progress.warm_ranks,
            restore_s=self._checkpoints.restore_s,
            heal_s=self._checkpoints.heal_s,
            healed=self._checkpoints.healed,
            survives=self._progress.survives(tell.rank) if tell.event == "first_step" else 0,
        )

    def leave(self, exiting: ExitAgent) -> Leave:
        """Announce that the agent leaves."""
        return Leave(
            job=self._plan.job,
            node=self._plan.node,
            instance=self._instance,
            round=self._agent.round or 0,
            cause=exiting.cause,
            reason=exiting.reason,
            exit_code=exiting.code,
            last_step=self._progress.last_step(),
        )
