"""Answers the questions of people and agents to straggler."""

import asyncio
from collections.abc import Callable
from typing import TypeVar

from msgspec.structs import replace

from everstep.bus.errors import BusError
from everstep.bus.ports import Bus, Handler
from everstep.bus.requests import RefusalError
from everstep.clock import Clock
from everstep.ids import new_id
from everstep.messages import (
    ClockReading,
    ControlDocument,
    HeatMapPart,
    Message,
    RankScoreTable,
    ReadClock,
    ShowHeatMap,
    ShowScores,
    ShowSwitches,
    ShowTimings,
    SwitchTable,
    TimingTable,
)
from everstep.messages.codec import BadMessageError, EncodingTooLargeError, decode_as, encode
from everstep.subjects import CLUSTER
from everstep_services.straggler.jobs import Jobs, TrackedJob
from everstep_services.straggler.judgements import Judge, JudgementRunner

_RANKS_MOST = 4096
_WINDOWS_MOST = 1000
_HEAT_RANKS_MOST = 16_384
_ROLES_NAMED = 20
_MEASURES = ("own", "ratio", "waited", "step", "cpu", "runnable", "round_trip", "section")
M = TypeVar("M", bound=Message)


class StragglerAnswers:
    """One of any number of replicas; each answers from what it has heard itself."""

    def __init__(self, bus: Bus, clock: Clock, jobs: Jobs, judgements: JudgementRunner) -> None:
        self._bus = bus
        self._clock = clock
        self._jobs = jobs
        self._judgements = judgements
        self._instance = new_id()
        self.open = asyncio.Event()
        """Set once questions can be received."""

    async def answer_for_ever(self) -> None:
        """Answer until cancelled."""
        handlers: dict[str, Handler] = {
            "scores": self._scores,
            "timings": self._timings,
            "heat_map": self._heat_map,
            "switches": self._switches,
            "clock": self._clock_reading,
        }
        async with self._bus.answer("straggler", handlers):
            self.open.set()
            await asyncio.Event().wait()

    async def _scores(self, question: Message) -> Message:
        assert isinstance(question, ShowScores)
        job = self._job(question.job)
        most = min(max(question.most, 0), _RANKS_MOST)

        def table(judge: Judge) -> RankScoreTable:
            _check_role(judge, question.role)
            return _fitting(lambda ranks: _table(job, judge.scores(ranks, question.role)), most)

        return await self._judgements.ask(job, table)

    async def _timings(self, question: Message) -> Message:
        assert isinstance(question, ShowTimings)
        job = self._jobs.past(question.job) or self._job(question.job)
        _check_measure(question.measure)
        bounded = replace(
            question,
            first_rank=max(question.first_rank, 0),
            most_windows=min(max(question.most_windows, 1), _WINDOWS_MOST),
        )
        most = min(max(question.most_ranks, 1), _RANKS_MOST)

        def table(judge: Judge) -> TimingTable:
            def of(ranks: int) -> TimingTable:
                answer = judge.timings(replace(bounded, most_ranks=max(ranks, 1)))
                return replace(answer, is_by_time=job.is_by_time)

            return _fitting(of, most)

        return await self._judgements.ask_of_past(job, table)

    async def _heat_map(self, question: Message) -> Message:
        assert isinstance(question, ShowHeatMap)
        job = self._jobs.past(question.job) or self._job(question.job)
        _check_measure(question.measure)

        def part(judge: Judge) -> HeatMapPart:
            def of(ranks: int) -> HeatMapPart:
                return replace(judge.heat_map_part(question, ranks), is_by_time=job.is_by_time)

            return _fitting(of, _HEAT_RANKS_MOST)

        return await self._judgements.ask_of_past(job, part)

    async def _switches(self, question: Message) -> Message:
        assert isinstance(question, ShowSwitches)
        cluster = await self._control(CLUSTER)
        job = None if question.job == CLUSTER else await self._control(question.job)
        return SwitchTable(switches=self._jobs.explained(cluster, job))

    async def _control(self, key: str) -> ControlDocument | None:
        try:
            document = await self._bus.documents("CONTROL").get(key)
        except BusError as error:
            raise RefusalError("503", f"the switches cannot be read: {error}") from error
        try:
            return None if document.data is None else decode_as(document.data, ControlDocument)
        except BadMessageError:
            return None  # a newer release wrote it: this release does not follow it either

    async def _clock_reading(self, question: Message) -> Message:
        assert isinstance(question, ReadClock)
        return ClockReading(clock=self._instance, at_s=self._clock.wall().timestamp())

    def _job(self, job: str) -> TrackedJob:
        tracked = self._jobs.get(job)
        if tracked is None:
            text = f"no timings of {job} have arrived: it does not run, or has sent none yet"
            raise RefusalError("404", text)
        return tracked


def _check_measure(measure: str) -> None:
    if measure not in _MEASURES:
        text = f"{measure[:40]!r} is not measured: use one of {', '.join(_MEASURES)}"
        raise RefusalError("422", text)


def _check_role(judge: Judge, role: str) -> None:
    """Refuse a role that no rank has; while nothing was compared, nobody knows the roles."""
    if not role or judge.scores(1, role).ranks:
        return
    roles = list(dict.fromkeys(score.role for score in judge.scores(_RANKS_MOST, "").ranks))
    if roles:
        more = ", …" if len(roles) > _ROLES_NAMED else ""
        text = f"no rank has the role {role[:100]!r}: use one of {', '.join(roles[:_ROLES_NAMED])}"
        raise RefusalError("422", text + more)


def _table(job: TrackedJob, table: RankScoreTable) -> RankScoreTable:
    note = table.said if job.switches.is_on else "timings are off: switch on straggler.timings"
    return replace(
        table, is_on=job.switches.is_on, window_steps=job.document.window_steps, said=note,
        is_by_time=job.is_by_time,
    )  # fmt: skip


def _fitting(make: Callable[[int], M], most: int) -> M:
    """Return the largest reply that fits into a message; `most` is halved until it does."""
    while True:
        reply = make(most)
        try:
            encode(reply)
        except EncodingTooLargeError:
            if most <= 1:
                raise
            most //= 2
        else:
            return reply
