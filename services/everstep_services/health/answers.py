"""The questions that people and services may ask health."""

import asyncio
import contextlib
from typing import Literal, assert_never

from msgspec.structs import replace

from everstep.bus.facts.recorder import Recorder
from everstep.bus.ports import Bus, Handler
from everstep.bus.requests import RefusalError
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.ids import new_id
from everstep.messages import (
    Done,
    ExcludeNode,
    FactStamp,
    IncludeNode,
    Message,
    NodeStandings,
    OperatorActed,
    RoundDocument,
    SetControl,
    SetLimit,
    ShowLimits,
    ShowNodes,
    operator_acted,
)
from everstep.messages.codec import BadMessageError, decode_as
from everstep.subjects import CLUSTER
from everstep_services.health.learned_limits import LearnedLimits
from everstep_services.health.nodes.actions import OperatorActions
from everstep_services.health.nodes.control_documents import ControlDocuments
from everstep_services.health.nodes.register import standings
from everstep_services.health.nodes.service import NodeService
from everstep_services.health.observer import HealthObserver

_HEALTH = "health"
_OVER = "the job is over: this matters only if it is started again"
Request = ExcludeNode | IncludeNode | SetControl | SetLimit
"""A request of a person. Health records each, accepted or refused."""


class HealthAnswers:
    """One of any number of replicas; each answers from the documents that all of them write."""

    def __init__(  # noqa: PLR0913  the parts that questions are about
        self,
        bus: Bus,
        clock: Clock,
        records: Recorder,
        *,
        actions: OperatorActions,
        observer: HealthObserver,
        limits: LearnedLimits,
        nodes: NodeService,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._records = records
        self._actions = actions
        self._observer = observer
        self._limits = limits
        self._nodes = nodes
        self._control = ControlDocuments(bus)
        self.open = asyncio.Event()
        """Set once the service answers."""

    async def answer_for_ever(self) -> None:
        """Answer until cancelled."""
        handlers: dict[str, Handler] = {
            "limits": self._show_limits,
            "nodes": self._show_nodes,
            **dict.fromkeys(("set_limit", "exclude", "include", "control"), self._audited),
        }
        async with self._bus.answer(_HEALTH, handlers):
            self.open.set()
            await asyncio.Event().wait()

    async def _show_limits(self, question: Message) -> Message:
        assert isinstance(question, ShowLimits)
        return await self._limits.show(question.job)

    async def _show_nodes(self, question: Message) -> Message:
        assert isinstance(question, ShowNodes)
        job = None if question.job == CLUSTER else question.job
        register = await self._nodes.read()
        control, _ = await self._control.read(CLUSTER)
        silences = self._observer.silences(job)
        asked = question.nodes or tuple(silences if job else {*silences, *register.nodes})
        return NodeStandings(
            nodes=standings(asked, register, control.exclusions, silences, self._clock.wall())
        )

    async def _audited(self, question: Message) -> Message:
        assert isinstance(question, Request)
        try:
            if isinstance(question, SetLimit | SetControl):
                await self._check_known(question.job)
            done = await self._carry_out(question)
            if isinstance(question, SetLimit | SetControl) and await self._is_over(question.job):
                done = replace(done, text=f"{done.text}; {_OVER}")
        except EverstepError as error:
            self._records.keep(self._acted(question, "refused", f"{question.reason}: {error}"))
            raise
        self._records.keep(self._acted(question, "accepted", question.reason))
        return done

    async def _is_over(self, job: str) -> bool:
        stored = await self._bus.documents("ROUNDS").get(job)
        with contextlib.suppress(BadMessageError):  # of a newer release
            phase = "" if stored.data is None else decode_as(stored.data, RoundDocument).phase
            return phase in {"done", "stopped"}
        return False

    async def _check_known(self, job: str) -> None:
        """Refuse an unknown job: a request with a wrong name would be accepted, and never act."""
        if job == CLUSTER or self._observer.has_heard(job):
            return
        for bucket in ("ROUNDS", "LIMITS", "CONTROL"):
            if (await self._bus.documents(bucket).get(job)).data is not None:
                return
        raise RefusalError("404", f"there is no job {job}: ask once it has started")

    async def _carry_out(self, question: Request) -> Done:
        match question:
            case ExcludeNode():
                return await self._actions.exclude(question)
            case IncludeNode():
                return await self._actions.include(question)
            case SetControl():
                return await self._actions.switch(question)
            case SetLimit():
                return await self._limits.set(question)
            case _:
                assert_never(question)

    def _acted(
        self, question: Request, outcome: Literal["accepted", "refused"], reason: str
    ) -> OperatorActed:
        head = FactStamp(self._clock.wall(), new_id, _HEALTH).head(question.job)
        return operator_acted(head, question, _named(question), outcome, reason)


def _named(question: Request) -> tuple[str, str]:
    """The action and its target, as in `operator_acted`."""
    match question:
        case ExcludeNode(node=node):
            return "exclude_node", node
        case IncludeNode(node=node):
            return "include_node", node
        case SetControl(changes=changes):
            return "set_control", ", ".join(f"{name}={value}" for name, value in changes.items())
        case SetLimit(limit=limit):
            value = f"{limit.limit_s:g} s" if limit.limit_s else "auto"
            return "set_limit", f"{limit.section or 'outside'}={value}"
        case _:
            assert_never(question)
