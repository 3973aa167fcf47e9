"""Requests of scripts to rendezvous, repeated until rendezvous answers."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from everstep.bus.errors import AskRefusedError, BusError
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.messages import Done, DrainNode, RestartJob, StopJob
from everstep_services.agent.rendezvous_client.client import BUSY, SERVICE
from everstep_services.agent.run_plan import RunPlan
from trainer_sdk.wire import Requested

log = logging.getLogger(__name__)

_WITHIN_S = 5.0
_AGAIN_S = 1.0
_LAST_WITHIN_S = 2.0


@dataclass(frozen=True, slots=True)
class _Wanted:
    verb: str
    question: DrainNode | RestartJob | StopJob


class ScriptRequests:
    """Sends one request at a time; of each kind, only the first in a round."""

    def __init__(self, plan: RunPlan, bus: Bus, clock: Clock, say: Callable[..., None]) -> None:
        self._plan = plan
        self._bus = bus
        self._clock = clock
        self._say = say
        self._heard: set[tuple[int, str]] = set()
        self._wanted: asyncio.Queue[_Wanted] = asyncio.Queue()

    def hear(self, request: Requested) -> None:
        """A rank asks rendezvous to exclude this node, for another round, or to stop the job."""
        key = (request.round, request.kind)
        if key in self._heard:
            log.info(
                "asked_already round=%d rank=%d kind=%s", request.round, request.rank, request.kind
            )
            return
        self._heard.add(key)
        reason = request.reason or "its script gives no reason"
        wish = {
            "exclude": f"{self._plan.node} be excluded",
            "restart": "the ranks be restarted",
            "stop": "the job be stopped",
        }[request.kind]
        self._say(f"rank {request.rank} asks that {wish}: {reason}")
        self._wanted.put_nowait(self._wish(request, reason))

    async def ask_for_ever(self) -> None:
        """Ask rendezvous for each request, until it is answered."""
        while True:
            wanted = await self._wanted.get()
            while not await self._is_answered(wanted):
                await self._clock.sleep(_AGAIN_S)
            self._wanted.task_done()

    async def finish(self) -> None:
        """Show answers that are on their way: the order that follows may overtake its answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WITHIN_S):
                await self._wanted.join()

    def _wish(self, request: Requested, reason: str) -> _Wanted:
        job, node, by = self._plan.job, self._plan.node, f"rank {request.rank} of {self._plan.node}"
        origin = request.origin
        if request.kind == "stop":
            return _Wanted("stop", StopJob(job=job, by=by, reason=reason, origin=origin))
        if request.kind == "restart":
            again = RestartJob(job=job, by=by, reason=reason, round=request.round, origin=origin)
            return _Wanted("restart", again)
        drain = DrainNode(
            job=job, node=node, by=by, reason=reason, origin=origin,
            # Saves since a wrong result are not restored.
            within_s=None if origin == "numerics" else self._plan.agent.preempt_grace_s,
        )  # fmt: skip
        return _Wanted("drain", drain)

    async def _is_answered(self, wanted: _Wanted) -> bool:
        question, job = wanted.question, self._plan.job
        await self._bus.wait_connected()
        try:
            done = await self._bus.ask(
                SERVICE, wanted.verb, question, Done, job=job, within_s=_WITHIN_S
            )
        except AskRefusedError as error:
            if error.code in BUSY:
                return False
            done = Done(text=str(error), is_refused=True)
        except (BusError, TimeoutError) as error:
            log.info("request_unanswered verb=%s error=%s", wanted.verb, error)
            return False
        outcome = "does not do what" if done.is_refused else "does what"
        text = f"rendezvous {outcome} {question.by} asks for: {done.text}"
        self._say(text, is_warning=done.is_refused)
        return True
