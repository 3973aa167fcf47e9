"""What people and services may ask of health."""

import asyncio

from everstep.bus.asking import RefusalError
from everstep.bus.ports import Bus, Handler
from everstep.bus.recorder import Recorder
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.ids import new_id
from everstep.messages import (
    Done,
    ExcludeNode,
    IncludeNode,
    Message,
    NodeStandings,
    OperatorActed,
    SetControl,
    SetLimit,
    ShowLimits,
    ShowNodes,
)
from everstep.subjects import CLUSTER
from everstep_services.health.limit_learner import Teacher
from everstep_services.health.nodes.actions import Deeds
from everstep_services.health.nodes.control_documents import Switches
from everstep_services.health.nodes.service import Registrar
from everstep_services.health.nodes.standings import standings
from everstep_services.health.observer import Observer

_HEALTH = "health"
Deed = ExcludeNode | IncludeNode | SetControl | SetLimit
"""What people ask to be done. It is on record, done or refused."""


class Answers:
    """One of any number of replicas; each answers from what all of them write down."""

    def __init__(  # noqa: PLR0913  each is a part that questions are about
        self,
        bus: Bus,
        clock: Clock,
        records: Recorder,
        *,
        deeds: Deeds,
        observer: Observer,
        teacher: Teacher,
        registrar: Registrar,
    ) -> None:
        self._bus = bus
        self._clock = clock
        self._records = records
        self._deeds = deeds
        self._observer = observer
        self._teacher = teacher
        self._registrar = registrar
        self._switches = Switches(bus)
        self.open = asyncio.Event()
        """Set once questions are heard."""

    async def answer_for_ever(self) -> None:
        """Answer until cancelled."""
        handlers: dict[str, Handler] = {
            "limits": self._limits,
            "nodes": self._nodes,
            **dict.fromkeys(("set_limit", "exclude", "include", "control"), self._audited),
        }
        async with self._bus.answer(_HEALTH, handlers):
            self.open.set()
            await asyncio.Event().wait()

    async def _limits(self, question: Message) -> Message:
        assert isinstance(question, ShowLimits)
        return await self._teacher.show(question.job)

    async def _nodes(self, question: Message) -> Message:
        assert isinstance(question, ShowNodes)
        job = None if question.job == CLUSTER else question.job
        register = await self._registrar.read()
        control, _ = await self._switches.read(CLUSTER)
        heard = self._observer.silences(job)
        asked = question.nodes or tuple(heard if job else {*heard, *register.nodes})
        return NodeStandings(
            nodes=standings(asked, register, control.exclusions, heard, self._clock.wall())
        )

    async def _audited(self, question: Message) -> Message:
        assert isinstance(question, Deed)
        try:
            if isinstance(question, SetLimit | SetControl):
                await self._check_known(question.job)
            done = await self._done(question)
        except EverstepError as error:
            self._records.keep(self._acted(question, "refused", f"{question.reason}: {error}"))
            raise
        self._records.keep(self._acted(question, "accepted", question.reason))
        return done

    async def _check_known(self, job: str) -> None:
        """A wrong name must not be taken: nobody would notice that what was asked never acts."""
        if job == CLUSTER or self._observer.has_heard(job):
            return
        for bucket in ("ROUNDS", "LIMITS", "CONTROL"):
            if (await self._bus.documents(bucket).get(job)).data is not None:
                return
        raise RefusalError("404", f"there is no job {job}: ask once it was started")

    async def _done(self, question: Deed) -> Done:
        match question:
            case ExcludeNode():
                return await self._deeds.exclude(question)
            case IncludeNode():
                return await self._deeds.include(question)
            case SetControl():
                return await self._deeds.switch(question)
            case SetLimit():
                return await self._teacher.set(question)

    def _acted(self, question: Deed, outcome: str, reason: str) -> OperatorActed:
        action, target = _named(question)
        return OperatorActed(
            id=new_id(),
            job=question.job,
            at=self._clock.wall(),
            source=_HEALTH,
            by=question.by,
            action=action,
            target=target,
            outcome=outcome,
            reason=reason,
            origin=question.origin,
        )


def _named(question: Deed) -> tuple[str, str]:
    """The action and what it is about, as in `operator_acted`."""
    match question:
        case ExcludeNode(node=node):
            return "exclude_node", node
        case IncludeNode(node=node):
            return "include_node", node
        case SetControl(changes=changes):
            said = ", ".join(f"{name}={value}" for name, value in changes.items())
            return "set_control", said
        case SetLimit(limit=limit):
            return "set_limit", f"{limit.section or 'outside'}={limit.limit_s:g} s"
