"""Fetches the states that a node's ranks need and do not find on it, before they restore."""

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import closing
from functools import partial
from pathlib import Path
from threading import Lock
from time import monotonic

import msgspec

from everstep.messages import Peer, StartRanks
from everstep_services.agent.replicas.choice import Age, Choice, Offered, choices, newest_of_all
from everstep_services.agent.replicas.coder import CodingError, give_back
from everstep_services.agent.replicas.images import CopyFile, OwnImages, read_head
from everstep_services.agent.replicas.last_state import LostState
from everstep_services.agent.replicas.memory_file import MemoryFile
from everstep_services.agent.replicas.store import Incoming, ReplicaStore
from everstep_services.agent.replicas.transfer.abortable_calls import in_thread, threads
from everstep_services.agent.replicas.transfer.client import Call
from everstep_services.agent.replicas.transfer.context import TransferContext
from everstep_services.agent.replicas.transfer.protocol import Copy, ReplicaError

_STILL_MOST_S = 30.0
"""A node may pause for some seconds; the ranks of a round wait no longer for it."""
_PAUSE_S = 0.5
_MAY_PASS = frozenset({"slow", "closed"})
"""A node that refuses a connection, or lacks the state, will do so again."""

Attempt = Callable[[], Awaitable[None]]


class TransferProgress:
    """How far a transfer has come, and when bytes last arrived."""

    def __init__(self) -> None:
        self._offset = 0
        self._moved_at = monotonic()

    def reached(self, offset: int) -> None:
        """Note the offset that was reached. Any thread may call this."""
        if offset > self._offset:
            self._offset, self._moved_at = offset, monotonic()

    @property
    def stands_still(self) -> bool:
        """Nothing has arrived for a time after which the wait should end."""
        return monotonic() - self._moved_at > _STILL_MOST_S


async def take_from_one(attempts: Sequence[Attempt], coming: TransferProgress) -> None:
    """Try until one attempt has taken all of it; each continues where the one before ended.

    Raises `ReplicaError` when no node is worth another attempt.
    """
    left, reasons = list(attempts), dict[str, None]()
    while left:
        again = []
        for attempt in left:
            try:
                await attempt()
            except ReplicaError as error:
                reasons[str(error)] = None
                log.warning("image_not_fetched error=%s", error)
                if error.cause in _MAY_PASS:
                    again.append(attempt)
            else:
                return
        left = [] if coming.stands_still else again
        if left:
            await asyncio.sleep(_PAUSE_S)
    raise ReplicaError("; ".join(reasons))


log = logging.getLogger(__name__)

OFFER = "offer.json"
Source = tuple[Peer, Copy]


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The result of fetching for a round; ranks wait for it."""

    round: int
    complete: bool
    """Each rank of the slot finds a state of the same step on this node."""
    reason: str
    is_sure: bool = True
    """Every node that may hold a state was asked, and has given it: there is no other one."""
    lost: LostState | None = None
    """The state that was in this node's memory and is gone."""


class Offers:
    """Writes offers for the ranks, in threads, which may outlive the round of their offer."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._lock = Lock()
        self._round = 0

    def write(self, offer: Offer) -> None:
        """Show the offer to the ranks, unless they wait for the offer of a later round."""
        written = self._base / f".{OFFER}"
        with self._lock:
            if offer.round < self._round:
                return
            self._round = offer.round
            written.write_bytes(msgspec.json.encode(offer))
            written.rename(self._base / OFFER)


class Fetcher:
    """Fetches states, for one round at a time."""

    def __init__(
        self, context: TransferContext, store: ReplicaStore, images: OwnImages, coded: Path
    ) -> None:
        self._context = context
        self._store = store
        self._images = images
        self._coded = coded

    async def fetch(self, order: StartRanks, without: frozenset[int]) -> Offer:
        """The newest step that all ranks of the slot can have, except suspect steps."""
        within_s = self._context.settings.fetch_within_s
        try:
            async with asyncio.timeout(within_s):
                offer = await self._fetched(order, without)
        except TimeoutError:
            late = f"nothing was fetched within {within_s:g} s"
            offer = Offer(round=order.round, complete=False, reason=late, is_sure=False)
        log.info(
            "images_offered round=%d complete=%s reason=%s",
            order.round,
            offer.complete,
            offer.reason,
        )
        return offer

    async def _fetched(self, order: StartRanks, without: frozenset[int]) -> Offer:
        ranks = range(order.first_rank, order.first_rank + order.ranks)
        with threads(self._context.settings.streams, "replicas-fetch") as pool:
            offers, failures = await self._offers(pool, order, ranks, without)
            here = await asyncio.to_thread(self._here, ranks, without)
            for choice in choices(ranks, here, offers):
                try:
                    await self._take(pool, choice)
                except (ReplicaError, CodingError, OSError) as error:
                    failures.append(f"step {choice.age[-1]}: {error}")
                    log.warning("images_not_fetched step=%d error=%s", choice.age[-1], error)
                    continue
                fetched = f"step {choice.age[-1]} was fetched from other nodes"
                return Offer(round=order.round, complete=True, reason=fetched)
        newest = newest_of_all(ranks, here)
        if newest is not None:
            here_already = f"step {newest[-1]} is on this node"
            return Offer(round=order.round, complete=True, reason=here_already)
        return Offer(
            round=order.round,
            complete=False,
            reason="; ".join(failures) or "no node has a state of this slot in memory",
            is_sure=not failures,
        )

    async def _offers(
        self, pool: Executor, order: StartRanks, ranks: range, without: frozenset[int]
    ) -> tuple[list[Offered[Source]], list[str]]:
        """The copies of others, and the nodes that could not be asked."""

        async def ask(source: Peer) -> tuple[Peer, tuple[Copy, ...] | ReplicaError]:
            try:
                return source, await once(source)
            except ReplicaError as error:
                log.info("source_asked_again node=%s error=%s", source.node, error)
            try:
                return source, await once(source)
            except ReplicaError as error:
                return source, error

        async def once(source: Peer) -> tuple[Copy, ...]:
            call = Call(source, self._context)

            def asked() -> tuple[Copy, ...]:
                with call:
                    return call.ask(ranks)

            return await in_thread(pool, call, asked)

        answers = await asyncio.gather(*(ask(source) for source in order.replica_sources))
        offers: list[Offered[Source]] = []
        failures: list[str] = []
        for source, offered in answers:
            if isinstance(offered, ReplicaError):
                failures.append(str(offered))
            else:
                offers += self._fitting(order, source, offered, without)
        return offers, failures

    def _fitting(
        self, order: StartRanks, source: Peer, copies: Sequence[Copy], without: frozenset[int]
    ) -> list[Offered[Source]]:
        """The copies that the ranks of this round could load."""
        offers = []
        for copy in copies:
            try:
                head = read_head(copy.index)
            except ReplicaError as error:
                log.warning("copy_passed_over node=%s error=%s", source.node, error)
                continue
            whose = head.identity
            fits = (whose.job, whose.world_size) == (order.job, order.world_size)
            if not fits or whose.round > order.round or whose.step in without:
                continue
            ours = msgspec.structs.replace(copy, slot=order.slot, ranks=order.ranks)
            offers.append(
                Offered(head.age, copy.rank, (source, ours), copy.part, copy.parts_needed)
            )
        return offers

    def _here(self, ranks: range, without: frozenset[int]) -> dict[int, set[Age]]:
        ages: dict[int, set[Age]] = {}
        for rank in ranks:
            held = (copy.head for copy in self._store.of_rank(rank) if copy.copy.parts == 1)
            heads = [*(image.head for image in self._images.of(rank)), *held]
            ages[rank] = {head.age for head in heads if head.identity.step not in without}
        return ages

    async def _take(self, pool: Executor, choice: Choice[Source]) -> None:
        """Fetch all ranks in parallel; if one fails, the others are not needed."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for number, offers in enumerate(choice.from_others.values()):
                    tasks.create_task(self._take_one(pool, offers, number))
        except* (ReplicaError, CodingError, OSError) as errors:
            raise errors.exceptions[0] from None

    async def _take_one(
        self, pool: Executor, offers: Sequence[Offered[Source]], number: int
    ) -> None:
        """Fetch a rank whole from a node that has it so, or else in parts."""
        whole = [offer for offer in offers if offer.parts_needed == 1]
        parts = [offer for offer in offers if offer.parts_needed > 1]
        first, coming = number % max(len(whole), 1), TransferProgress()
        attempts = [
            partial(self._take_whole, pool, *offer.source, coming)
            for offer in (*whole[first:], *whole[:first])
        ]
        try:
            await take_from_one(attempts, coming)
        except ReplicaError:
            if not parts:
                raise
            await self._take_parts(pool, parts)

    async def _take_whole(
        self, pool: Executor, source: Peer, copy: Copy, coming: TransferProgress
    ) -> None:
        call = Call(source, self._context)

        def take() -> None:
            incoming = self._store.begin(copy)
            if incoming is None:
                return
            try:
                with call:
                    call.get(incoming)
                self._store.finish(incoming)
            finally:
                coming.reached(incoming.offset)
                self._store.pause(incoming)

        await in_thread(pool, call, take)

    async def _take_parts(self, pool: Executor, offers: Sequence[Offered[Source]]) -> None:
        """Fetch as many parts as are needed in parallel, and restore the state from them."""
        needed = offers[0].parts_needed
        first = offers[0].source[1]
        folder = self._coded / f"fetched-{first.rank}-{first.step}"
        await asyncio.to_thread(folder.mkdir, mode=0o700, parents=True, exist_ok=True)
        parts: dict[int, CopyFile] = {}
        failures: list[str] = []

        async def take(source: Peer, copy: Copy) -> None:
            path = folder / f"part-{copy.part}"
            try:
                await self._take_part(pool, source, copy, path, may_pause=not left)
            except (ReplicaError, OSError) as error:
                failures.append(str(error))
            else:
                parts[copy.part] = CopyFile(copy, path)

        try:
            left = list(offers)
            while len(parts) < needed and left:
                turn = {offer.part: offer for offer in reversed(left)}
                async with asyncio.TaskGroup() as tasks:
                    for offer in [*turn.values()][: needed - len(parts)]:
                        left.remove(offer)
                        tasks.create_task(take(*offer.source))
                left = [offer for offer in left if offer.part not in parts]
            if len(parts) < needed:
                raise ReplicaError(
                    f"{len(parts)} of {needed} parts of step {first.step} of rank {first.rank} "
                    f"could be fetched: {'; '.join(failures)}"
                )
            await self._from_parts(list(parts.values()))
        finally:
            await asyncio.shield(asyncio.to_thread(_remove, folder))

    async def _take_part(
        self, pool: Executor, source: Peer, copy: Copy, path: Path, *, may_pause: bool
    ) -> None:
        """Fetch one part; `may_pause`: no other part would do as well."""
        coming = TransferProgress()
        memory = await asyncio.to_thread(MemoryFile, path, copy.size_bytes)
        incoming = Incoming(copy, read_head(copy.index), path, memory)

        async def attempt() -> None:
            call = Call(source, self._context)

            def take() -> None:
                try:
                    with call:
                        call.get(incoming)
                finally:
                    coming.reached(incoming.offset)
                if incoming.hash.hexdigest() != copy.hash:
                    raise ReplicaError(
                        f"part {copy.part} from {source.node} is not what it said", "torn"
                    )

            await in_thread(pool, call, take)

        with closing(memory):
            await (take_from_one([attempt], coming) if may_pause else attempt())

    async def _from_parts(self, parts: Sequence[CopyFile]) -> None:
        copy = parts[0].copy
        head = read_head(copy.index)
        whole = msgspec.structs.replace(
            copy, part=0, parts=1, parts_needed=1, size_bytes=head.size_bytes, hash=head.hash
        )
        incoming = await asyncio.to_thread(self._store.begin, whole)
        if incoming is None:
            return
        incoming.memory.close()  # another process writes it
        try:
            hashed = await give_back(parts, head.size_bytes, incoming.path)
            await asyncio.to_thread(self._store.finish, incoming, hashed)
        finally:
            self._store.pause(incoming)


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
