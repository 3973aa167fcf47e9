"""Has the agent's core decide what follows from probes."""

from collections.abc import Callable, Sequence

from everstep_services.agent.core.actions import Action
from everstep_services.agent.core.agent import Agent
from everstep_services.agent.probes.periodic.history import ProbeChange


class ProbeReports:
    """Passes the results of probes on to the core, and its actions to the service."""

    def __init__(self, agent: Agent, do: Callable[[Sequence[Action]], None]) -> None:
        self._agent = agent
        self._do = do

    def probe_failed(self, change: ProbeChange, fact: str) -> None:
        self._do(self._agent.check_failed(change.check, change.policy, change.reason, fact))

    def probe_recovered(self, change: ProbeChange, fact: str) -> None:
        self._do(self._agent.check_recovered(change.check, change.reason, fact))

    def probe_compared(self, check: str, state: str, reason: str) -> None:
        self._do(self._agent.check_compared(check, state, reason))
