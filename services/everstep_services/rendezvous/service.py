"""Receives questions, findings and documents, and passes each to the runner of its job."""

import asyncio
import logging
from collections.abc import Mapping

import msgspec

from everstep import subjects
from everstep.bus.input_failures import InputFailures
from everstep.bus.ports import Bus, Document, Handler
from everstep.clock import Clock
from everstep.ids import checked_name
from everstep.messages import (
    ControlDocument,
    Fact,
    Join,
    Message,
    NodeLost,
    NodesDocument,
    RoundDocument,
    ShowRound,
    StallLocated,
)
from everstep.messages.codec import BadMessageError, decode_as
from everstep.messages.documents.health import combined
from everstep.runtime import Loop
from everstep_services.rendezvous.domain.events import Event, JobControl, Tick
from everstep_services.rendezvous.job_runner import BUCKET, JobRunner, ReplicaContext, RunnerCounts
from everstep_services.rendezvous.settings import RendezvousSettings

log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.25
_SHOWN_BYTES = 900_000
_NODES = msgspec.json.Decoder(NodesDocument)
_VERBS = (
    "join",
    "leave",
    "report",
    "stop",
    "restart",
    "save",
    "drain",
    "evidence",
    "check",
    "measure",
    "copy",
    "release",
)


class Rendezvous:
    """One of any number of replicas; any other replica can continue from the documents."""

    def __init__(self, settings: RendezvousSettings, bus: Bus, clock: Clock) -> None:
        self._settings = settings
        self._bus = bus
        self._clock = clock
        self._controls: dict[str, ControlDocument] = {}
        self._suspects: Mapping[str, str] = {}
        self._runners: dict[str, JobRunner] = {}
        self._around: ReplicaContext | None = None
        self._counts = RunnerCounts()
        self._input_failures = InputFailures("rendezvous")
        self.answers = asyncio.Event()
        """Set once it receives questions."""

    def statistics(self) -> dict[str, float]:
        """Return its counters, for metrics."""
        counts = {f"{name}_total": getattr(self._counts, name) for name in RunnerCounts.__slots__}
        failures = self._input_failures.failures + sum(
            runner.failures for runner in self._runners.values()
        )
        return counts | {
            "jobs": float(len(self._runners)),
            "suspects": float(len(self._suspects)),
            "input_failures_total": float(failures),
        }

    @property
    def loops(self) -> tuple[Loop, ...]:
        """Return the loops to run."""
        return (self.serve_for_ever,)

    async def serve_for_ever(self) -> None:
        """Answer and decide until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            self._around = ReplicaContext(
                self._settings, self._bus, self._clock, self._control, tasks, self._counts
            )
            tasks.create_task(self._follow_control(), name="control")
            tasks.create_task(self._follow_nodes(), name="nodes")
            tasks.create_task(self._follow_rounds(), name="rounds")
            tasks.create_task(self._hear_findings(), name="findings")
            tasks.create_task(self._watch_bus(), name="bus")
            handlers: dict[str, Handler] = dict.fromkeys(_VERBS, self._asked)
            handlers["show"] = self._show
            async with self._bus.answer("rendezvous", handlers):
                self.answers.set()
                await asyncio.Event().wait()

    async def _asked(self, question: Message) -> Message:
        job: str = getattr(question, "job", "")
        if isinstance(question, Join):  # its names become parts of subjects
            checked_name("node", question.node)
            checked_name("agent", question.instance)
        event: Event = question  # type: ignore[assignment]  # each verb's own, or no answer
        return await self._runner(job).ask(event)

    async def _show(self, question: Message) -> Message:
        assert isinstance(question, ShowRound)
        return _shown(await self._runner(question.job).show())

    def _runner(self, job: str) -> JobRunner:
        runner = self._runners.get(job)
        if runner is None:
            assert self._around is not None
            runner = self._runners[job] = JobRunner(job, self._around)
            self._around.tasks.create_task(runner.work_for_ever(), name=f"job-{job}")
        return runner

    def _control(self, job: str) -> JobControl:
        both = combined(self._controls.get(subjects.CLUSTER), self._controls.get(job))
        return JobControl(
            is_braked=both.is_braked,
            modes=both.modes,
            exclusions=both.exclusions,
            suspects=self._suspects,
        )

    async def _follow_rounds(self) -> None:
        async with self._bus.documents(BUCKET).follow() as documents:
            async for document in documents:
                if subjects.is_name(document.key):
                    self._runner(document.key).offer(document)

    async def _follow_control(self) -> None:
        async with self._bus.documents("CONTROL").follow() as documents:
            async for document in documents:
                with self._input_failures.caught(f"document CONTROL/{document.key}"):
                    self._switch(document)

    def _switch(self, document: Document) -> None:
        try:
            if document.data is None:
                self._controls.pop(document.key, None)
            else:
                self._controls[document.key] = decode_as(document.data, ControlDocument)
        except BadMessageError as error:
            log.warning("control_unreadable key=%s error=%s", document.key, error)
            return
        for job, runner in self._runners.items():
            if document.key in {job, subjects.CLUSTER}:
                runner.tell(Tick())

    async def _follow_nodes(self) -> None:
        """Apply health's last document, whether or not health runs now."""
        async with self._bus.documents("NODES").follow(subjects.CLUSTER) as documents:
            async for document in documents:
                with self._input_failures.caught("document NODES"):
                    try:
                        self._suspects = _suspects(document)
                    except (msgspec.DecodeError, ValueError) as error:
                        log.warning("nodes_unreadable error=%s", error)

    async def _hear_findings(self) -> None:
        async with self._bus.subscribe(subjects.lost(), Fact) as findings:
            async for finding in findings:
                with self._input_failures.caught("a finding of health"):
                    runner = self._runners.get(finding.job)
                    if runner is not None and isinstance(finding, NodeLost | StallLocated):
                        runner.tell(finding)

    async def _watch_bus(self) -> None:
        """Wake every runner after the bus was away, so that it reads its document again."""
        await self._bus.wait_connected()
        returns = self._bus.returns
        while True:
            await self._clock.sleep(_LOOK_EVERY_S)
            if self._bus.connected and self._bus.returns == returns:
                continue
            log.warning("bus_away nothing is decided until it is back")
            await self._bus.wait_connected()
            returns = self._bus.returns
            log.info("bus_back jobs=%d", len(self._runners))
            for runner in self._runners.values():
                runner.wake()


def _suspects(document: Document) -> dict[str, str]:
    nodes = () if document.data is None else _NODES.decode(document.data).nodes
    return {node.node: node.reason for node in nodes if node.suspicion}


def _shown(document: RoundDocument) -> RoundDocument:
    """Return the document without its key, and without seats if it exceeds one message."""
    replication = document.replication
    if replication is not None:
        replication = msgspec.structs.replace(replication, key="")
    shown = msgspec.structs.replace(document, outbox=(), replication=replication)
    if len(msgspec.json.encode(shown)) <= _SHOWN_BYTES:
        return shown
    reason = f"{shown.reason} ({len(shown.seats)} seats are left out here)"
    return msgspec.structs.replace(shown, seats=(), former=(), reason=reason)
