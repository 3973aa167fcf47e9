"""The plan of an agent in attach mode: settled before it begins, and frozen."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from everstep_services.agent.run_plan import AgentPlan
from everstep_services.agent.stalls.limits_table import ExternalLimits
from trainer_sdk.launchers import LaunchedRank


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedPlan(AgentPlan):
    """The job, as described by the environment of the rank that has started the agent."""

    folder: Path
    """The folder with the ranks' pages."""
    place: LaunchedRank
    """The place of that rank."""
    master: tuple[str, int]
    user: str
    state_dir: Path
    environ: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The environment of that rank: the others have mostly the same."""
    others: ExternalLimits = field(default_factory=ExternalLimits)

    @property
    def tells_of_job(self) -> bool:
        """Whether this agent is the one that records facts about the job."""
        return self.place.slot == 0
