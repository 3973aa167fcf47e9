"""The questions that people and services may ask the catalog."""

import asyncio
from collections.abc import Iterator
from functools import partial
from typing import Literal, assert_never

from everstep.bus.errors import BusError
from everstep.bus.ports import Bus, Handler
from everstep.bus.requests import RefusalError
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.ids import new_id
from everstep.messages import (
    ChangeCheckpoint,
    CheckpointsCollected,
    CheckpointsLocated,
    CollectCheckpoints,
    Done,
    FactStamp,
    JudgedCheckpoint,
    ListCheckpoints,
    LocateCheckpoint,
    Message,
    RequestRelease,
    ScanCheckpoints,
    operator_acted,
)
from everstep.units import size
from everstep_services.catalog.domain.places import listed, located
from everstep_services.catalog.domain.retention import RetentionRules, judged
from everstep_services.catalog.indexer import Indexer
from everstep_services.catalog.maintenance import Maintenance, StoreLeftovers, Work
from everstep_services.catalog.operations import known_in
from everstep_services.catalog.storage_threads import OutOfReachError

_CATALOG = "catalog"
_MOST = 1000
_ASK_S = 3.0
Request = ChangeCheckpoint | ScanCheckpoints | CollectCheckpoints
"""A request of a person. The catalog records each, accepted or refused."""


class CatalogAnswers:
    """One of any number of replicas; each answers from the documents that all of them write."""

    def __init__(self, bus: Bus, clock: Clock, indexer: Indexer, maintenance: Maintenance) -> None:
        self._bus = bus
        self._clock = clock
        self._indexer = indexer
        self._maintenance = maintenance
        self.open = asyncio.Event()
        """Set once the service answers."""

    async def answer_for_ever(self) -> None:
        """Answer until cancelled."""
        handlers: dict[str, Handler] = {
            "locate": self._locate,
            "list": self._list,
            **dict.fromkeys(("change", "scan", "collect"), self._audited),
        }
        async with self._bus.answer(_CATALOG, handlers):
            self.open.set()
            await asyncio.Event().wait()

    async def _locate(self, question: Message) -> Message:
        assert isinstance(question, LocateCheckpoint)
        index = await self._maintenance.glance(question.job)
        seats = await self._maintenance.rounds.seats(question.job) if index.slots else ()
        places, rejected = located(index, question.step, question.world_size, seats)
        return CheckpointsLocated(places=tuple(places[:_MOST]), rejected=tuple(rejected[:_MOST]))

    async def _list(self, question: Message) -> Message:
        assert isinstance(question, ListCheckpoints)
        index = await self._maintenance.glance(question.job)
        seats = await self._maintenance.rounds.seats(question.job) if index.holdings else ()
        most = min(max(question.most, 1), _MOST)
        return CheckpointsLocated(places=tuple(listed(index, most, question.tier, seats)))

    async def _audited(self, question: Message) -> Message:
        assert isinstance(question, Request)
        try:
            done = await self._carry_out(question)
        except OutOfReachError as error:
            done = Done(text=str(error), is_refused=True)
        except EverstepError as error:
            await self._record(question, "refused", f"{question.reason}: {error}")
            raise
        if isinstance(done, Done) and done.is_refused:
            await self._record(question, "refused", f"{question.reason}: {done.text}")
        elif not (isinstance(question, CollectCheckpoints) and question.is_dry_run):
            await self._record(question, "accepted", question.reason)
        return done

    async def _carry_out(self, question: Request) -> Done | CheckpointsCollected:
        match question:
            case ChangeCheckpoint():
                return await self._change(question)
            case ScanCheckpoints():
                return await self._scan(question)
            case CollectCheckpoints():
                return await self._collect(question)
            case _:
                assert_never(question)

    async def _change(self, ask: ChangeCheckpoint) -> Done:
        operations = self._maintenance.operations
        match ask.action:
            case "pin":
                return await operations.pin(ask)
            case "unpin":
                return await operations.unpin(ask)
            case "quarantine":
                return await operations.quarantine(ask)
            case "release":
                return await self._release(ask)
            case "verify":
                checkpoint = known_in(await self._indexer.read(ask.job), ask)
                text = (
                    f"step {ask.step} is read back; the fact checkpoint_verified brings the result"
                )
                return self._enqueue(ask.job, partial(operations.verify, ask.job, checkpoint), text)
            case "delete":
                checkpoint = known_in(await self._indexer.read(ask.job), ask)
                return await operations.delete(
                    ask.job, checkpoint, f"{ask.by}: {ask.reason}", ask.by
                )
            case _:
                raise RefusalError(
                    "422",
                    f"{ask.action!r} is not an operation on a checkpoint: use pin, unpin, verify, "
                    "quarantine, release or delete",
                )

    async def _release(self, ask: ChangeCheckpoint) -> Done:
        """Release a checkpoint; for states in memory, rendezvous orders their agents to do so."""
        if ask.tier == "global":
            return await self._maintenance.operations.release(ask)
        question = RequestRelease(job=ask.job, step=ask.step, by=ask.by, reason=ask.reason)
        try:
            done = await self._bus.ask(
                "rendezvous", "release", question, Done, job=ask.job, within_s=_ASK_S
            )
        except BusError as error:
            raise OutOfReachError(
                f"rendezvous did not order the agents to release it: {error}"
            ) from error
        if done.is_refused:
            return done
        text = (
            f"{done.text} for states of step {ask.step}: each agent that has some records "
            f"checkpoint_released"
        )
        return Done(text=text)

    async def _scan(self, ask: ScanCheckpoints) -> Done:
        roots = [ask.root] if ask.root else sorted((await self._indexer.read(ask.job)).roots)
        if not roots:
            text = f"the catalog knows no folder or URL of {ask.job}: name one"
            return Done(text=text, is_refused=True)
        texts = [await self._maintenance.scan(root, ask.job) for root in roots]
        return Done(text="; ".join(texts))

    async def _collect(self, ask: CollectCheckpoints) -> CheckpointsCollected:
        rules, _ = await self._maintenance.rules(ask.job)
        asked = RetentionRules(
            keep_last=rules.keep_last if ask.keep_last is None else max(ask.keep_last, 0),
            keep_every_steps=rules.keep_every_steps
            if ask.keep_every_steps is None
            else max(ask.keep_every_steps, 0),
        )
        index = await self._indexer.read(ask.job)
        decisions = judged(index.known.values(), asked, restored_step=index.restored_step)
        doomed = [decision for decision in decisions if not decision.is_kept]
        leftovers, why_not = await self._maintenance.cleanup.look_soon(index)
        if not ask.is_dry_run:
            why, delete = f"{ask.by}: {ask.reason}", self._maintenance.operations.delete
            for decision in reversed(doomed):
                work = partial(delete, ask.job, decision.checkpoint, why, ask.by)
                self._maintenance.enqueue(ask.job, work)
            clean_up = partial(self._maintenance.clean_up, ask.job, leftovers)
            self._maintenance.enqueue(ask.job, clean_up)
        removed = [row for in_root in leftovers for row in _leftover_rows(in_root)]
        freed = size(sum(decision.checkpoint.size_bytes for decision in doomed))
        texts = [f"{len(doomed)} of {len(decisions)} checkpoints go, which frees {freed}"]
        if not asked.keep_last:
            texts = ["retention is off: give the number of the newest checkpoints to keep"]
        if removed:
            freed = size(sum(row.size_bytes for row in removed))
            texts.append(f"leftovers of failed saves go, too: {len(removed)} with {freed}")
        if why_not:
            texts.append(f"the catalog did not look for leftovers of failed saves: {why_not}")
        if ask.is_dry_run and (asked.keep_last or removed):
            texts.append("nothing was deleted")
        rows = [*(decision.shown for decision in decisions), *removed]
        return CheckpointsCollected(judged=tuple(rows[:_MOST]), text="; ".join(texts))

    def _enqueue(self, job: str, work: Work, text: str) -> Done:
        if self._maintenance.enqueue(job, work):
            return Done(text=text)
        return Done(text="too many requests wait already: ask again later", is_refused=True)

    async def _record(
        self, question: Request, outcome: Literal["accepted", "refused"], reason: str
    ) -> None:
        head = FactStamp(self._clock.wall(), new_id, _CATALOG).head(question.job)
        await self._bus.record(operator_acted(head, question, _named(question), outcome, reason))


def _leftover_rows(leftovers: StoreLeftovers) -> Iterator[JudgedCheckpoint]:
    for leaving in leftovers.leavings:
        yield JudgedCheckpoint(
            step=leaving.step,
            is_kept=False,
            reason=leaving.reason,
            path=f"{leftovers.root}/{leaving.folder}",
            size_bytes=leaving.size_bytes,
        )


def _named(question: Request) -> tuple[str, str]:
    """The action and its target, as in `operator_acted`."""
    match question:
        case ChangeCheckpoint(action=action, step=step, tier=tier):
            return f"{action}_checkpoint", f"step {step} ({tier})"
        case ScanCheckpoints(root=root):
            return "scan_checkpoints", root
        case CollectCheckpoints():
            return "collect_checkpoints", ""
        case _:
            assert_never(question)
