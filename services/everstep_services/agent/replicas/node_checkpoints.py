"""Checkpoints on this node: what ranks say becomes facts; their states are kept beside them."""

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from everstep.bus.background import in_background
from everstep.clock import Clock
from everstep.messages import Fact, ReleaseImages, StartRanks
from everstep.settings import remember_secret
from everstep_services.agent.core.actions import AboutStates
from everstep_services.agent.replicas.held_copy import Held
from everstep_services.agent.replicas.last_state import Witness
from everstep_services.agent.replicas.local_root import check_local_root
from everstep_services.agent.replicas.manager import Keep
from everstep_services.agent.replicas.recorder import Story
from everstep_services.agent.replicas.server import opened_door
from everstep_services.agent.replicas.session import Standing
from everstep_services.agent.replicas.state_folder import Departure, opened_images, sweep
from everstep_services.agent.replicas.store import Store
from everstep_services.agent.replicas.tls import opened_tls
from everstep_services.agent.run_plan import RunPlan
from trainer_sdk.wire import Checkpointed

log = logging.getLogger(__name__)

_DONE = 0
_SWEEP_EVERY_S = 60.0


class Checkpoints:
    """One agent's. Without memory for files it only passes on what ranks say."""

    def __init__(
        self, job: str, node: str, clock: Clock, departure: Departure | None = None
    ) -> None:
        self._departure = departure or Departure(clock=clock)
        self._folder: Path | None = None
        self._witness: Witness | None = None
        self._story = Story(job, node)
        self._clock = clock
        self._record: Callable[[Fact], None] = lambda _: None
        self._keep: Keep | None = None
        self._door: socket.socket | None = None
        self._failed: set[tuple[int, str, str]] = set()
        self.restore_s = 0.0
        """How long the ranks of this round took to have their state back, as far as they said."""

    @property
    def port(self) -> int | None:
        """Where other nodes send their states."""
        return None if self._door is None else int(self._door.getsockname()[1])

    def keeps(self, keep: Keep, door: socket.socket | None, folder: Path, witness: Witness) -> None:
        """There is memory for states."""
        self._keep, self._door, self._folder, self._witness = keep, door, folder, witness
        keep.released = self.released

    def reports_to(self, record: Callable[[Fact], None]) -> None:
        """Who puts facts on record."""
        self._record = record

    async def keep_for_ever(self) -> None:
        """Send, hold and fetch states, until cancelled."""
        if self._keep is not None:
            async with in_background(self._sweep_for_ever()):
                await self._keep.keep_for_ever(self._door)

    def agent_ends(self, code: int) -> None:
        """The agent exits with this: states stay, unless all is done or a person has ended it."""
        self._departure.stays = code not in (_DONE, 128 + signal.SIGINT)
        if self._witness is not None:
            (self._witness.close if self._departure.stays else self._witness.forget)()

    async def _sweep_for_ever(self) -> None:
        while self._folder is not None:
            await self._clock.sleep(_SWEEP_EVERY_S)
            await asyncio.to_thread(sweep, self._folder, self._departure)

    def begins(self, order: StartRanks) -> None:
        """The ranks of a round are about to be started."""
        if order.replica_key:
            remember_secret(order.replica_key)
        self._failed.clear()
        self.restore_s = 0.0
        self._story.begins(order)
        if self._keep is not None:
            self._keep.begins(order)

    def ends(self) -> None:
        """They are gone."""
        for fact in self._story.ends(self._clock.wall()):
            self._record(fact)

    def said(self, line: Checkpointed) -> None:
        """A rank says what became of a checkpoint."""
        for fact in self._story.heard(line, self._clock.now(), self._clock.wall()):
            self._record(fact)
        took_s = line.body.get("took_s")
        if line.event == "restored" and isinstance(took_s, float):
            self.restore_s = max(self.restore_s, took_s)
        if self._keep is None:
            return
        step = line.body.get("step")
        if line.event == "image":
            self._keep.look()
            if self._witness is not None and isinstance(step, int):
                self._witness.saw(step, line.round)
        elif line.event == "quarantine" and isinstance(step, int):
            self._keep.distrust(step)

    def ask(self, order: AboutStates) -> None:
        """Copy, drop or release what is here."""
        if self._keep is not None:
            self._keep.ask(order)

    def stored(self, held: Held, by: str, took_s: float) -> None:
        """All of a slot's state is held here, for the first time in a round."""
        self._record(self._story.replica_stored(held, by, took_s, self._clock.wall()))

    def failed(self, step: int, node: str, reason: str, cause: str) -> None:
        """A state did not reach a keeper: said once for each cause, not for each step."""
        key = (self._story.round, node, cause)
        if key not in self._failed:
            self._failed.add(key)
            self._record(self._story.not_replicated(step, reason, cause, self._clock.wall()))

    def released(self, order: ReleaseImages, tier: str, folder: Path) -> None:
        """A state that was quarantined may be restored again."""
        self._record(self._story.released(order, tier, str(folder), self._clock.wall()))


@asynccontextmanager
async def opened_checkpoints(
    plan: RunPlan, clock: Clock
) -> AsyncIterator[tuple[Checkpoints, Path | None]]:
    """The desk, and the folder where ranks keep their states; gone when the job has ended well."""
    settings = plan.checkpoints
    tls = await asyncio.to_thread(opened_tls, settings)
    departure = Departure(
        for_s=settings.states_left_for_s,
        most_bytes=settings.left_most_bytes,
        room_least_bytes=settings.room_least_bytes,
        clock=clock,
        is_on_disk=settings.local_root is not None,
    )
    if settings.local_root is not None:
        await asyncio.to_thread(check_local_root, settings.local_root)
    checkpoints = Checkpoints(plan.job, plan.node, clock, departure)
    async with AsyncExitStack() as stack:
        opening = opened_images(plan.job, plan.node, settings.states_dir, departure)
        folder = await asyncio.to_thread(stack.enter_context, opening)
        if folder is None:
            log.warning("no_memory_for_images place=%s", settings.states_dir)
            yield checkpoints, None
            return
        store = await asyncio.to_thread(Store, folder, plan.job, settings)
        stack.callback(store.close)
        door = None
        if settings.replicate and plan.spec.nodes_max + plan.spec.spares > 1:
            door = stack.enter_context(opened_door(plan.address, settings.port))
        standing = Standing(plan.job, plan.node, settings, tls=tls)
        witness = await asyncio.to_thread(
            Witness, plan.state_dir, plan.job, plan.node, clock, settings.states_setting
        )
        if plan.allow_fresh_start:
            witness.forget()
        keep = Keep(standing, folder, store, clock, checkpoints.stored, checkpoints.failed)
        keep.witness = witness
        checkpoints.keeps(keep, door, folder, witness)
        yield checkpoints, folder
