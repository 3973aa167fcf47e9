"""Checkpoints on this node: what ranks report becomes facts; states in memory are replicated."""

import asyncio
from collections.abc import Callable
from pathlib import Path

from everstep.bus.background import in_background
from everstep.clock import Clock
from everstep.messages import Fact, ReleaseImages, StartRanks, StateHealed
from everstep.settings import remember_secret
from everstep_services.agent.core.actions import AboutStates
from everstep_services.agent.replicas.manager import ReplicaManager
from everstep_services.agent.replicas.node_states import NodeStates
from everstep_services.agent.replicas.recorder import CheckpointRecorder
from everstep_services.agent.replicas.state_folder import sweep
from everstep_services.agent.replicas.store import HeldCopy
from everstep_services.agent.telemetry.facts import AgentFacts
from trainer_sdk.wire import Checkpointed

_SWEEP_EVERY_S = 60.0


class NodeCheckpoints:
    """The checkpoints of one agent. Without states in memory it only records what ranks report."""

    def __init__(
        self,
        records: AgentFacts,
        clock: Clock,
        record: Callable[[Fact], None],
        states: NodeStates | None = None,
    ) -> None:
        self._recorder = CheckpointRecorder(records, clock)
        self._clock = clock
        self._record = record
        self._states = states
        self._replicas: ReplicaManager | None = None
        if states is not None:
            self._replicas = ReplicaManager(
                states.context, states.folder, states.store, clock, self, states.last_state
            )
        self._failed: set[tuple[int, str, str]] = set()
        self.restore_s = 0.0
        """The longest restore of this round, in seconds, as far as ranks have reported theirs."""
        self.heal_s = 0.0
        """How long it took until all ranks had their states, where some had kept theirs."""
        self.healed = ""
        """What became of the ranks and their states then."""

    @property
    def port(self) -> int | None:
        """The port to which other nodes send their states."""
        return None if self._states is None else self._states.port

    async def keep_for_ever(self) -> None:
        """Send, hold and fetch states, until cancelled."""
        if self._replicas is not None and self._states is not None:
            async with in_background(self._sweep_for_ever(self._states)):
                await self._replicas.keep_for_ever(self._states.listener)

    async def _sweep_for_ever(self, states: NodeStates) -> None:
        while True:
            await self._clock.sleep(_SWEEP_EVERY_S)
            await asyncio.to_thread(sweep, states.folder, states.leftovers)

    def begins(self, order: StartRanks) -> None:
        """The ranks of a round are about to be started."""
        if order.replica_key:
            remember_secret(order.replica_key)
        self._failed.clear()
        self.restore_s = self.heal_s = 0.0
        self.healed = ""
        self._recorder.begins(order)
        if self._replicas is not None:
            self._replicas.begins(order)

    def ends(self) -> None:
        """The ranks of the round are gone."""
        for fact in self._recorder.ends():
            self._record(fact)

    def said(self, line: Checkpointed) -> None:
        """A rank reports about a checkpoint."""
        for fact in self._recorder.heard(line):
            self._record(fact)
        took_s = line.body.get("took_s")
        if line.event == "restored" and isinstance(took_s, float):
            self.restore_s = max(self.restore_s, took_s)
        if self._replicas is None:
            return
        step = line.body.get("step")
        if line.event == "image":
            self._replicas.look()
            if self._states is not None and isinstance(step, int):
                self._states.last_state.saw(step, line.round)
        elif line.event == "quarantine" and isinstance(step, int):
            self._replicas.distrust(step)

    def all_healed(self, fact: StateHealed) -> None:
        """All ranks have their states, as rank 0 tells. A restore is part of that time."""
        self.restore_s, self.heal_s, self.healed = 0.0, fact.took_s, fact.sentence

    def ask(self, order: AboutStates) -> None:
        """Copy or release states that this node holds."""
        if self._replicas is not None:
            self._replicas.ask(order)

    def stored(self, held: HeldCopy, by: str, took_s: float) -> None:
        """All ranks of a slot are held here, for the first time in a round."""
        self._record(self._recorder.replica_stored(held, by, took_s))

    def failed(self, step: int, node: str, reason: str, cause: str) -> None:
        """A state did not reach a holder; recorded once for each cause, not for each step."""
        key = (self._recorder.round, node, cause)
        if key not in self._failed:
            self._failed.add(key)
            self._record(self._recorder.not_replicated(step, reason, cause))

    def released(self, order: ReleaseImages, tier: str, folder: Path) -> None:
        """A state that was quarantined may be restored again."""
        self._record(self._recorder.released(order, tier, str(folder)))
