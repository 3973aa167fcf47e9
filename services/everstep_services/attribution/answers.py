"""Answers the questions of people to attribution, and reads evidence on request."""

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import replace

from everstep.bus.ports import Bus, Handler
from everstep.bus.requests import RefusalError
from everstep.messages import (
    BlobRef,
    Case,
    CollectiveFault,
    CollectivesRead,
    CorrectVerdict,
    Done,
    FoldedStack,
    Message,
    OpenCollective,
    ReadEvidence,
    StacksRead,
    Suspicion,
)
from everstep.messages.base import shared
from everstep.messages.codec import encode
from everstep.verdict_causes import VERDICT_CAUSES
from everstep_services.attribution.flight_recorder.report import Fault, MeetingState, Suspect
from everstep_services.attribution.incident import Incident
from everstep_services.attribution.readings import Piece, flight_report, stack_report
from everstep_services.attribution.service import Attribution
from everstep_services.attribution.stack_analysis.report import StackGroup, StackSuspect, words

_CONTENT_BYTES = 256 << 20
"""The most bytes of all pieces of one question together."""
_ANSWER_BYTES = 512 << 10
_WAITING_MOST = 4
_FETCH_S = 10.0
_FETCH_ALL_S = 60.0
_SUSPECTS_MOST = 64
_FAULTS_MOST = 16
_STACKS_MOST = 64
_FRAMES_MOST = 64
_FRAME_CHARACTERS = 240
_NOTES_MOST = 64

R = TypeVar("R")
A = TypeVar("A", CollectivesRead, StacksRead)


class EvidenceReader:
    """One question after the other: dumps are large, and verdicts come first."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._turn = asyncio.Lock()
        self._waiting = 0

    async def collectives(self, asked: ReadEvidence) -> CollectivesRead:
        """How far each rank was; `RefusalError` if no recorder can be read."""
        report, missing = await self._read(asked, partial(flight_report, ended=asked.ended))
        if report is None or not report.dumps:
            raise _unreadable("flight recorder", missing, () if report is None else report.notes)
        lists = {
            "faults": tuple(_fault(fault) for fault in report.faults[:_FAULTS_MOST]),
            "notes": (*missing, *report.notes)[:_NOTES_MOST],
        }
        answer = CollectivesRead(
            **{**shared(CollectivesRead, report), **lists},
            collectives=tuple(_collective(meeting) for meeting in report.meetings),
            is_cut=len(report.faults) > _FAULTS_MOST,
        )
        return _fitting(answer, "faults", "collectives")

    async def stacks(self, asked: ReadEvidence) -> StacksRead:
        """Where the ranks stood; `RefusalError` if no stack can be read."""
        report, missing = await self._read(asked, stack_report)
        if report is None or not report.ranks:
            raise _unreadable("stack", missing, () if report is None else report.notes)
        groups = (*report.groups, *report.others)
        lists = {
            "suspects": _suspicions(report.suspects),
            "notes": (*missing, *report.notes)[:_NOTES_MOST],
        }
        answer = StacksRead(
            **{**shared(StacksRead, report), **lists},
            stacks=tuple(_stack(group) for group in groups[:_STACKS_MOST]),
            is_cut=len(groups) > _STACKS_MOST,
        )
        return _fitting(answer, "stacks")

    async def _read(
        self, asked: ReadEvidence, read: Callable[[Sequence[Piece], int | None], R]
    ) -> tuple[R, Sequence[str]]:
        if self._waiting >= _WAITING_MOST:
            raise RefusalError("503", f"{_WAITING_MOST} questions about evidence wait already")
        self._waiting += 1
        try:
            async with self._turn:
                pieces, missing = await self._contents(asked)
                return await asyncio.to_thread(read, pieces, asked.world_size or None), missing
        finally:
            self._waiting -= 1

    async def _contents(self, asked: ReadEvidence) -> tuple[list[Piece], Sequence[str]]:
        case = Case(job=asked.job, incident="", round=0, evidence=asked.evidence)
        incident = Incident(case, self._fetch)
        pieces: list[Piece] = []
        size = 0
        try:
            async with asyncio.timeout(_FETCH_ALL_S):
                for piece in asked.evidence:
                    size += 0 if piece.blob is None else piece.blob.size_bytes
                    if size > _CONTENT_BYTES:
                        most = _CONTENT_BYTES >> 20
                        incident.missing.append(f"more than {most} MiB; the rest was not read")
                        break
                    content = await incident.content(piece)
                    if content is not None:
                        pieces.append((piece.rank, content))
        except TimeoutError:
            late = f"not all came within {_FETCH_ALL_S:g} s; the rest was not read"
            incident.missing.append(late)
        return pieces, incident.missing

    async def _fetch(self, ref: BlobRef) -> bytes:
        async with asyncio.timeout(_FETCH_S):
            return await self._bus.blobs.get(ref)


def _unreadable(kind: str, missing: Sequence[str], notes: Sequence[str]) -> RefusalError:
    why = next(iter((*missing, *notes)), "no piece of evidence belongs to a rank")
    return RefusalError("422", f"no {kind} can be read: {why}")


def _fault(fault: Fault) -> CollectiveFault:
    fields = shared(CollectiveFault, fault)
    return CollectiveFault(**{**fields, "suspects": _suspicions(fault.suspects)})


def _suspicions(suspects: Sequence[Suspect | StackSuspect]) -> tuple[Suspicion, ...]:
    return tuple(
        Suspicion(rank=suspect.rank, reason=suspect.reason) for suspect in suspects[:_SUSPECTS_MOST]
    )


def _collective(meeting: MeetingState) -> OpenCollective:
    ranks: Any = meeting.ranks
    return OpenCollective(**shared(OpenCollective, meeting), **ranks)


def _stack(group: StackGroup) -> FoldedStack:
    return FoldedStack(
        ranks=group.ranks,
        thread=group.thread,
        does=words(group.state),
        frames=tuple(frame[:_FRAME_CHARACTERS] for frame in group.frames[:_FRAMES_MOST]),
    )


def _fitting(answer: A, *lists: str) -> A:
    """The answer, cut until one message can carry it."""
    while len(encode(answer)) > _ANSWER_BYTES and any(getattr(answer, name) for name in lists):
        halves = {name: getattr(answer, name)[: len(getattr(answer, name)) // 2] for name in lists}
        answer = replace(answer, is_cut=True, **halves)
    return answer


_CULPRITS_MOST = 1024
_TEXT_MOST = 2000


class AttributionAnswers:
    """One of any number of replicas; each answers from the documents that all of them write."""

    def __init__(self, bus: Bus, attribution: Attribution) -> None:
        self._bus = bus
        self._attribution = attribution
        self._reader = EvidenceReader(bus)
        self.open = asyncio.Event()
        """Set once questions can be received."""

    async def answer_for_ever(self) -> None:
        """Answer until cancelled."""
        handlers: dict[str, Handler] = {
            "correct": self._correct,
            "collectives": self._collectives,
            "stacks": self._stacks,
        }
        async with self._bus.answer("attribution", handlers):
            self.open.set()
            await asyncio.Event().wait()

    async def _collectives(self, question: Message) -> Message:
        assert isinstance(question, ReadEvidence)
        return await self._reader.collectives(question)

    async def _stacks(self, question: Message) -> Message:
        assert isinstance(question, ReadEvidence)
        return await self._reader.stacks(question)

    async def _correct(self, question: Message) -> Message:
        assert isinstance(question, CorrectVerdict)
        if question.cause not in VERDICT_CAUSES:
            raise RefusalError(
                "422",
                f"{question.cause[:40]!r} is not a cause: use one of {', '.join(VERDICT_CAUSES)}",
            )
        if not question.by.strip():
            raise RefusalError("422", "a correction needs the name of its author")
        culprits = max(len(question.culprit_ranks), len(question.culprit_nodes))
        if culprits > _CULPRITS_MOST or len(question.reason) > _TEXT_MOST:
            raise RefusalError(
                "422",
                f"a correction may name {_CULPRITS_MOST} ranks and nodes, in {_TEXT_MOST} "
                f"characters; it has {culprits} and {len(question.reason)}",
            )
        if any(rank < 0 for rank in question.culprit_ranks):
            raise RefusalError("422", f"ranks begin at 0, got {min(question.culprit_ranks)}")
        correction = await self._attribution.correct(question)
        if correction is None:
            raise _unknown(question.job, question.incident)
        if correction.is_confirmation:
            return Done(text=f"confirmed: {correction.cause}")
        is_other = correction.was_cause not in {"", correction.cause}
        before = f" instead of {correction.was_cause}" if is_other else ""
        return Done(text=f"corrected: {correction.cause}{before}; this is the verdict from now on")


def _unknown(job: str, incident: str) -> RefusalError:
    return RefusalError(
        "404",
        f"no incident {incident[:80]!r} of {job} is remembered: of those with a verdict only the "
        f"newest few of a job are; `everstep incidents {job}` lists all",
    )
