"""The plan of an agent in attach mode: settled before it begins, and frozen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from everstep.messages import JobSpec
from everstep_services.agent.probes.settings import ChecksSettings
from everstep_services.agent.run_plan import Scheduler
from everstep_services.agent.stalls.limits import LimitRules
from everstep_services.agent.stalls.limits_table import ExternalLimits
from trainer_sdk.launchers import LaunchedRank


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedPlan:
    """The job, as described by the environment of the rank that has started the agent."""

    job: str
    node: str
    folder: Path
    """The folder with the ranks' pages."""
    place: LaunchedRank
    """The place of that rank."""
    spec: JobSpec
    allocation: str
    scheduler: Scheduler
    address: str
    master: tuple[str, int]
    user: str
    state_dir: Path
    checks: ChecksSettings = field(default_factory=ChecksSettings)
    timings: bool = True
    """Measure where the time of ranks goes, and report it to straggler."""
    traces_url: str = ""
    """Where the spans of this agent go: a collector of OpenTelemetry. Empty sends none."""
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The environment of that rank: the others have mostly the same."""
    evidence_without: tuple[str, ...] = ()
    """Kinds of evidence that are not collected."""
    limits: LimitRules = field(default_factory=LimitRules)
    others: ExternalLimits = field(default_factory=ExternalLimits)

    @property
    def tells_of_job(self) -> bool:
        """Whether this agent is the one that records facts about the job."""
        return self.place.slot == 0
