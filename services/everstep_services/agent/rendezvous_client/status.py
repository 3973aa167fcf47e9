"""What an agent asks rendezvous: whether it may join, what something means, and goodbye."""

from everstep import __version__
from everstep.messages import Join, Leave, Report, StartRanks
from everstep_services.agent.core.actions import Exiting, Tell
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.probes.node_checks import Checks
from everstep_services.agent.rendezvous_client.ports import Reserved
from everstep_services.agent.run_plan import RunPlan
from everstep_services.agent.telemetry.progress import Progress


class Questions:
    """Says everything as it is at the moment of asking."""

    def __init__(
        self, plan: RunPlan, agent: Agent, progress: Progress, instance: str,
        replica_port: int | None,
    ) -> None:  # fmt: skip
        self._plan = plan
        self._agent = agent
        self._progress = progress
        self._instance = instance
        self._replica_port = replica_port
        self._reserved: Reserved | None = None
        self.checks: Checks | None = None
        self.is_warm = False
        """The forge is ready."""
        self.evidence_s = 0.0
        """How long evidence was collected before the last round's ranks were stopped."""
        self.stop_s = 0.0
        """How long the last round's ranks took to stop."""
        self.restore_s = 0.0
        """How long the ranks of this round took to have their state back."""

    def free_port(self, order: StartRanks) -> None:
        """The port that we offered is about to be used, if the ranks meet here."""
        if self._reserved is not None and order.slot == 0:
            self._reserved.free()
            self._reserved = None

    def join(self) -> Join:
        """Ask whether we may take part."""
        plan, agent = self._plan, self._agent
        if self._reserved is None:
            self._reserved = Reserved()
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
            last_round=agent.last_round,
            last_slot=agent.last_slot if agent.order is None else agent.order.slot,
            last_step=self._progress.last_step(),
            checks=() if self.checks is None else self.checks.failing,
            warm=self.is_warm,
            known_round=agent.round or 0,
            running=agent.order,
            running_state=agent.running_state,
            master_port=self._reserved.port,
            replica_port=self._replica_port,
            evidence_s=self.evidence_s,
            stop_s=self.stop_s,
            version=__version__,
        )

    def report(self, tell: Tell, order: StartRanks, fact: str | None) -> Report:
        """Ask what this means for the round."""
        ending = tell.exit
        return Report(
            job=self._plan.job,
            node=self._plan.node,
            instance=self._instance,
            slot=order.slot,
            round=tell.round,
            event=tell.event,
            reason=tell.reason,
            fact=fact,
            rank=tell.rank,
            step=tell.step if tell.event == "reached" else self._progress.last_step(),
            fingerprint="" if ending is None else ending.fingerprint,
            exit_code=None if ending is None else ending.code,
            is_of_code=ending is not None and ending.is_of_code,
            last_progress_age_s=self._progress.age_s() if tell.age_s is None else tell.age_s,
            grace_s=tell.grace_s,
            waited_s=tell.waited_s,
            entered=tell.entered,
            excuse_s=tell.excuse_s,
            step_s=tell.step_s,
            warm_ranks=self._progress.warm_ranks,
            restore_s=self.restore_s,
        )

    def leave(self, exiting: Exiting) -> Leave:
        """We go."""
        return Leave(
            job=self._plan.job,
            node=self._plan.node,
            instance=self._instance,
            round=self._agent.round or 0,
            cause=exiting.cause,
            reason=exiting.reason,
            exit_code=exiting.code,
        )
