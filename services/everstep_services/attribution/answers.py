"""Answers the questions of people to attribution."""

import asyncio

from everstep.bus.ports import Bus, Handler
from everstep.bus.requests import RefusalError
from everstep.messages import CorrectVerdict, Done, Message, ReadEvidence
from everstep.verdict_causes import VERDICT_CAUSES
from everstep_services.attribution.evidence_reader import EvidenceReader
from everstep_services.attribution.service import Attribution

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
