"""What people and services may ask of the catalog."""

import asyncio
from collections.abc import Iterable, Iterator
from functools import partial

from everstep.bus.asking import RefusalError
from everstep.bus.errors import BusError
from everstep.bus.ports import Bus, Handler
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.ids import new_id
from everstep.messages import (
    ChangeCheckpoint,
    CheckpointsCollected,
    CheckpointsLocated,
    CollectCheckpoints,
    Done,
    JudgedCheckpoint,
    ListCheckpoints,
    LocateCheckpoint,
    Message,
    OperatorActed,
    RequestRelease,
    ScanCheckpoints,
)
from everstep.sizes import size
from everstep_services.catalog.domain.places import listed, located
from everstep_services.catalog.domain.retention import Judged, Rules, judged
from everstep_services.catalog.indexer import Indexer
from everstep_services.catalog.maintenance import Tender, Work
from everstep_services.catalog.operations import known_in
from everstep_services.catalog.stores import OutOfReachError
from everstep_services.catalog.sweeping import Left

_CATALOG = "catalog"
_MOST = 1000
_ASK_S = 3.0
Deed = ChangeCheckpoint | ScanCheckpoints | CollectCheckpoints
"""What people ask to be done. It is on record, done or refused."""


class Answers:
    """One of any number of replicas; each answers from what all of them write down."""

    def __init__(self, bus: Bus, clock: Clock, indexer: Indexer, tender: Tender) -> None:
        self._bus = bus
        self._clock = clock
        self._indexer = indexer
        self._tender = tender
        self.open = asyncio.Event()
        """Set once questions are heard."""

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
        index = await self._tender.glance(question.job)
        seats = await self._tender.rounds.seats(question.job) if index.slots else ()
        places, rejected = located(index, question.step, question.world_size, seats)
        return CheckpointsLocated(places=tuple(places[:_MOST]), rejected=tuple(rejected[:_MOST]))

    async def _list(self, question: Message) -> Message:
        assert isinstance(question, ListCheckpoints)
        index = await self._tender.glance(question.job)
        seats = await self._tender.rounds.seats(question.job) if index.holdings else ()
        most = min(max(question.most, 1), _MOST)
        return CheckpointsLocated(places=tuple(listed(index, most, question.tier, seats)))

    async def _audited(self, question: Message) -> Message:
        assert isinstance(question, Deed)
        try:
            done = await self._done(question)
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

    async def _done(self, question: Deed) -> Done | CheckpointsCollected:
        match question:
            case ChangeCheckpoint():
                return await self._change(question)
            case ScanCheckpoints():
                return await self._scan(question)
            case CollectCheckpoints():
                return await self._collect(question)

    async def _change(self, ask: ChangeCheckpoint) -> Done:
        deeds = self._tender.deeds
        match ask.action:
            case "pin":
                return await deeds.pin(ask)
            case "unpin":
                return await deeds.unpin(ask)
            case "quarantine":
                return await deeds.quarantine(ask)
            case "release":
                return await self._release(ask)
            case "verify":
                one = known_in(await self._indexer.read(ask.job), ask)
                text = f"step {ask.step} is read back; what is found comes as checkpoint_verified"
                return self._soon(partial(deeds.verify, ask.job, one), text)
            case "delete":
                one = known_in(await self._indexer.read(ask.job), ask)
                return await deeds.delete(ask.job, one, f"{ask.by}: {ask.reason}", ask.by)
            case _:
                raise RefusalError(
                    "422",
                    f"{ask.action!r} cannot be done to a checkpoint: use pin, unpin, verify, "
                    "quarantine, release or delete",
                )

    async def _release(self, ask: ChangeCheckpoint) -> Done:
        """States in memory are marked where they are: their agents are ordered to."""
        if ask.tier == "global":
            return await self._tender.deeds.release(ask)
        question = RequestRelease(job=ask.job, step=ask.step, by=ask.by, reason=ask.reason)
        try:
            done = await self._bus.ask(
                "rendezvous", "release", question, Done, job=ask.job, within_s=_ASK_S
            )
        except BusError as error:
            raise OutOfReachError(f"nobody orders the agents to: {error}") from error
        if done.is_refused:
            return done
        text = f"{done.text} for states of step {ask.step}: who has some says checkpoint_released"
        return Done(text=text)

    async def _scan(self, ask: ScanCheckpoints) -> Done:
        roots = [ask.root] if ask.root else sorted((await self._indexer.read(ask.job)).roots)
        if not roots:
            text = f"the catalog knows no folder or URL of {ask.job}: name one"
            return Done(text=text, is_refused=True)
        said = [await self._tender.scan(root, ask.job) for root in roots]
        return Done(text="; ".join(said))

    async def _collect(self, ask: CollectCheckpoints) -> CheckpointsCollected:
        rules, _ = await self._tender.rules(ask.job)
        asked = Rules(
            keep_last=rules.keep_last if ask.keep_last is None else max(ask.keep_last, 0),
            keep_every_steps=rules.keep_every_steps
            if ask.keep_every_steps is None
            else max(ask.keep_every_steps, 0),
        )
        index = await self._indexer.read(ask.job)
        found = judged(index.known.values(), asked, restored_step=index.restored_step)
        doomed = [one for one in found if not one.is_kept]
        left, why_not = await self._tender.sweeper.look_soon(index)
        if not ask.is_dry_run:
            why = f"{ask.by}: {ask.reason}"
            for one in reversed(doomed):
                work = partial(self._tender.deeds.delete, ask.job, one.checkpoint, why, ask.by)
                self._tender.soon(work)
            self._tender.soon(partial(self._tender.sweep, ask.job, left))
        swept = [row for one in left for row in _left_in(one)]
        said = [f"{len(doomed)} of {len(found)} checkpoints go, which frees {size(_bytes(doomed))}"]
        if not asked.keep_last:
            said = ["retention is off: say how many of the newest are to stay"]
        if swept:
            left_bytes = sum(one.size_bytes for one in swept)
            said.append(f"what dead saves left goes, too: {len(swept)} with {size(left_bytes)}")
        if why_not:
            said.append(f"what dead saves left was not looked for: {why_not}")
        if ask.is_dry_run and (asked.keep_last or swept):
            said.append("nothing was deleted")
        rows = [*map(_told, found), *swept]
        return CheckpointsCollected(judged=tuple(rows[:_MOST]), text="; ".join(said))

    def _soon(self, work: Work, text: str) -> Done:
        if self._tender.soon(work):
            return Done(text=text)
        return Done(text="too much waits to be done already: ask again later", is_refused=True)

    async def _record(self, question: Deed, outcome: str, reason: str) -> None:
        action, target = _named(question)
        await self._bus.record(
            OperatorActed(
                id=new_id(),
                job=question.job,
                at=self._clock.wall(),
                source=_CATALOG,
                by=question.by,
                action=action,
                target=target,
                outcome=outcome,
                reason=reason,
                origin=question.origin,
            )
        )


def _told(one: Judged) -> JudgedCheckpoint:
    return JudgedCheckpoint(
        step=one.checkpoint.step,
        is_kept=one.is_kept,
        reason=one.reason,
        path=one.checkpoint.path,
        size_bytes=one.checkpoint.size_bytes,
    )


def _left_in(place: Left) -> Iterator[JudgedCheckpoint]:
    for one in place.leavings:
        yield JudgedCheckpoint(
            step=one.step,
            is_kept=False,
            reason=one.reason,
            path=f"{place.root}/{one.folder}",
            size_bytes=one.size_bytes,
        )


def _bytes(doomed: Iterable[Judged]) -> int:
    return sum(one.checkpoint.size_bytes for one in doomed)


def _named(question: Deed) -> tuple[str, str]:
    """The action and what it is about, as in `operator_acted`."""
    match question:
        case ChangeCheckpoint(action=action, step=step, tier=tier):
            return f"{action}_checkpoint", f"step {step} ({tier})"
        case ScanCheckpoints(root=root):
            return "scan_checkpoints", root
        case CollectCheckpoints():
            return "collect_checkpoints", ""
