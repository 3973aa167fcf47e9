"""The folder of a node's states, opened before any rank is started: memory, port, last state."""

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from everstep.clock import Clock
from everstep_services.agent.replicas.last_state import LastState
from everstep_services.agent.replicas.local_root import check_local_root
from everstep_services.agent.replicas.state_folder import LeftoverPolicy, opened_images
from everstep_services.agent.replicas.store import ReplicaStore
from everstep_services.agent.replicas.transfer.context import TransferContext
from everstep_services.agent.replicas.transfer.server import opened_port
from everstep_services.agent.replicas.transfer.tls import opened_tls
from everstep_services.agent.run_plan import RunPlan

log = logging.getLogger(__name__)

_DONE = 0


@dataclass(frozen=True, slots=True)
class NodeStates:
    """Where this node keeps states; gone when the job has ended well. Use `opened_states`."""

    folder: Path
    store: ReplicaStore
    context: TransferContext
    last_state: LastState
    leftovers: LeftoverPolicy
    listener: socket.socket | None
    """Where other nodes send their states; None if this node holds none for others."""

    @property
    def port(self) -> int | None:
        """The port of the listener."""
        return None if self.listener is None else int(self.listener.getsockname()[1])

    def agent_ends(self, code: int) -> None:
        """Keep the states, unless the job is done or a person has ended the agent."""
        self.leftovers.stays = code not in (_DONE, 128 + signal.SIGINT)
        (self.last_state.close if self.leftovers.stays else self.last_state.forget)()


@asynccontextmanager
async def opened_states(plan: RunPlan, clock: Clock) -> AsyncIterator[NodeStates | None]:
    """Yield the states of this node; None without memory, or if another agent has the folder."""
    settings = plan.checkpoints
    tls = await asyncio.to_thread(opened_tls, settings)
    leftovers = LeftoverPolicy(
        for_s=settings.states_left_for_s,
        most_bytes=settings.left_most_bytes,
        room_least_bytes=settings.room_least_bytes,
        clock=clock,
        is_on_disk=settings.local_root is not None,
    )
    if settings.local_root is not None:
        await asyncio.to_thread(check_local_root, settings.local_root)
    async with AsyncExitStack() as stack:
        opening = opened_images(plan.job, plan.node, settings.states_dir, leftovers)
        folder = await asyncio.to_thread(stack.enter_context, opening)
        if folder is None:
            log.warning("no_memory_for_images place=%s", settings.states_dir)
            yield None
            return
        store = await asyncio.to_thread(ReplicaStore, folder, plan.job, settings)
        stack.callback(store.close)
        listener = None
        if settings.replicate and plan.spec.nodes_max + plan.spec.spares > 1:
            listener = stack.enter_context(opened_port(plan.address, settings.port))
        context = TransferContext(plan.job, plan.node, settings, tls=tls)
        last_state = await asyncio.to_thread(
            LastState, plan.state_dir, plan.job, plan.node, clock, settings.states_setting
        )
        if plan.allow_fresh_start:
            last_state.forget()
        yield NodeStates(folder, store, context, last_state, leftovers, listener)
