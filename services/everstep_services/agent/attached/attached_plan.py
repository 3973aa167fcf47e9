"""What an agent in attach mode watches: settled before it begins, and frozen."""

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
    """The job, as the environment of the rank tells that has started us."""

    job: str
    node: str
    folder: Path
    """Where the ranks' pages are."""
    place: LaunchedRank
    """Of that rank."""
    spec: JobSpec
    allocation: str
    scheduler: Scheduler
    address: str
    master: tuple[str, int]
    user: str
    state_dir: Path
    checks: ChecksSettings = field(default_factory=ChecksSettings)
    timings: bool = True
    """Straggler is told where the time of ranks goes."""
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Of the rank that has started us: the others have it mostly alike."""
    evidence_without: tuple[str, ...] = ()
    """Kinds of evidence that are not collected."""
    limits: LimitRules = field(default_factory=LimitRules)
    others: ExternalLimits = field(default_factory=ExternalLimits)

    @property
    def tells_of_job(self) -> bool:
        """One of the job's agents does."""
        return self.place.slot == 0
