"""Requests of a policy to other services: stop a job, replace a node."""

import logging
from collections.abc import Awaitable, Callable

from everstep.bus.errors import AskRefusedError, BusError
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.messages import Done, DrainNode, ExcludeNode, StopJob
from everstep.subjects import CLUSTER

log = logging.getLogger(__name__)

WITHIN_S = 4.0
_TRIES = 3
_PAUSE_S = 1.0


class PolicyRequests:
    """Asks rendezvous and health in the name of one service."""

    def __init__(self, bus: Bus, clock: Clock, source: str) -> None:
        self._bus = bus
        self._clock = clock
        self._source = source

    async def stop(self, job: str, reason: str) -> Done:
        """Have rendezvous stop a job, after a save."""
        stop = StopJob(job=job, by=self._source, reason=reason, origin="service")
        return await self._rendezvous("stop", job, stop)

    async def replace(
        self, job: str, node: str, reason: str, *, drain_within_s: float | None = None
    ) -> Done:
        """Exclude a node, and drain it, so that a spare takes its slot.

        Health is asked first, so that the node does not come back as its own spare.
        """
        out = ExcludeNode(
            job=CLUSTER, node=node, by=self._source, reason=f"{job}: {reason}", origin="service"
        )
        excluded = await self._bus.ask(
            "health", "exclude", out, Done, job=CLUSTER, within_s=WITHIN_S
        )
        if excluded.is_refused:
            return excluded
        drain = DrainNode(
            job=job, node=node, by=self._source, reason=reason, within_s=drain_within_s,
            origin="service",
        )  # fmt: skip
        drained = await self._rendezvous("drain", job, drain)
        refused = "it is excluded, and not drained: " if drained.is_refused else ""
        return Done(text=f"{excluded.text}; {refused}{drained.text}")

    async def answered(self, job: str, ask: Callable[[], Awaitable[Done]]) -> Done:
        """Repeat a request until a service answers; refused if none does, or with an error."""
        problem = ""
        for attempt in range(_TRIES):
            try:
                return await ask()
            except AskRefusedError as error:
                return Done(text=str(error), is_refused=True)
            except (BusError, TimeoutError) as error:
                problem = str(error)
                log.info("asking_again job=%s attempt=%d error=%s", job, attempt, error)
                await self._clock.sleep(_PAUSE_S)
        return Done(text=f"nobody answered: {problem}", is_refused=True)

    async def _rendezvous(self, verb: str, job: str, question: StopJob | DrainNode) -> Done:
        return await self._bus.ask("rendezvous", verb, question, Done, job=job, within_s=WITHIN_S)
