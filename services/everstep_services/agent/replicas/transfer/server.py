"""Takes and gives states: serves other agents of the job that prove that they have its key."""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from everstep.errors import EverstepError
from everstep_services.agent.replicas.displacement import ImageSender
from everstep_services.agent.replicas.images import OwnImages
from everstep_services.agent.replicas.memory_file import MappedFiles
from everstep_services.agent.replicas.store import HeldCopy, ReplicaStore
from everstep_services.agent.replicas.transfer.abortable_calls import in_thread, threads
from everstep_services.agent.replicas.transfer.context import TransferContext
from everstep_services.agent.replicas.transfer.protocol import (
    AskHolding,
    BytesFollow,
    Copy,
    GetCopy,
    Hello,
    HoldingAnswer,
    PutCopy,
    RefusalAnswer,
    ReplicaError,
    ReplicaLink,
    SendFrom,
    StoredAnswer,
)
from everstep_services.agent.replicas.transfer.tls import refusal

log = logging.getLogger(__name__)

_PROVES_WITHIN_S = 20.0
_PATIENCE_S = 60.0
_WAITING = 64
_CALLERS_MOST = 32
_PAUSE_S = 0.2
"""After a connection could not be taken: the process may have a descriptor again then."""

Arrived = Callable[[HeldCopy, str, float], None]
"""A copy from this node became whole, after this time; called in a thread."""


class ReplicaPortError(EverstepError):
    """The node cannot listen for other agents."""

    def __init__(self, address: str, port: int, error: OSError) -> None:
        super().__init__(
            f"other nodes cannot send their states to {address or 'any address'} port {port}: "
            f"{error.strerror}; choose another agent.checkpoints.port, or 0 for any"
        )


def opened_port(address: str, port: int) -> socket.socket:
    """A socket that others can reach; on loopback alone if that is this node's address."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    own = {"127.0.0.1": "127.0.0.1", "localhost": "127.0.0.1", "::1": "::1"}.get(address, "")
    door = socket.socket(family, socket.SOCK_STREAM)
    try:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        door.bind((own, port))  # everywhere else the key keeps strangers out
        door.listen(_WAITING)
    except OSError as error:
        door.close()
        raise ReplicaPortError(own, port, error) from error
    door.settimeout(0)
    return door


class ReplicaServer:
    """Serves a bounded number of callers at once; the others wait to connect."""

    def __init__(
        self, door: socket.socket, context: TransferContext, store: ReplicaStore, images: OwnImages,
        arrived: Arrived,
    ) -> None:  # fmt: skip
        self._door = door
        self._context = context
        self._store = store
        self._images = images
        self._arrived = arrived

    async def serve_for_ever(self) -> None:
        """Serve until cancelled; then every connection has ended."""
        free = asyncio.Semaphore(_CALLERS_MOST)

        async def attend(link: ReplicaLink, address: str) -> None:
            try:
                await in_thread(pool, link, partial(self._attend, link, address))
            finally:
                link.close()
                free.release()

        with threads(_CALLERS_MOST, "replicas-in") as pool:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await free.acquire()
                    wire, place = await self._accepted()
                    silent_s = self._context.settings.silent_s
                    tasks.create_task(attend(ReplicaLink(wire, silent_s=silent_s), place[0]))

    async def _accepted(self) -> tuple[socket.socket, tuple[str, int]]:
        """The next connection, also after a time in which none could be taken."""
        told = ""
        while True:
            try:
                return await asyncio.get_running_loop().sock_accept(self._door)
            except OSError as error:  # it is without descriptors, or the caller is gone
                if told != str(error):
                    told = str(error)
                    log.warning("replica_callers_wait error=%s", error.strerror)
            await asyncio.sleep(_PAUSE_S)

    def _attend(self, link: ReplicaLink, address: str) -> None:
        who = address
        try:
            link.within(_PROVES_WITHIN_S)
            key = self._context.key
            if not key:
                return
            if self._context.tls is not None:
                link.secure(self._context.tls, is_caller=False)
            link.prove(key, is_caller=False)
            hello = link.hear_question()
            if not isinstance(hello, Hello) or hello.job != self._context.job:
                return
            who = hello.node
            while True:
                link.within(_PATIENCE_S)
                self._answer(link, hello)
        except EOFError:
            return
        except ssl.SSLError as error:
            log.warning("replica_caller_refused from=%s error=%s", who, refusal(error))
        except (OSError, ReplicaError) as error:
            log.info("replica_caller_lost node=%s error=%s", who, str(error) or "it is too slow")

    def _answer(self, link: ReplicaLink, hello: Hello) -> None:
        asked = link.hear_question()
        try:
            match asked:
                case PutCopy():
                    self._take(link, hello, asked)
                case AskHolding():
                    link.say(HoldingAnswer(copies=tuple(self._copies(asked.ranks))))
                case GetCopy():
                    self._give(link, asked)
                case Hello():
                    link.say(RefusalAnswer(reason="that was announced already"))
        except ReplicaError as error:
            link.say(RefusalAnswer(reason=str(error), cause=error.cause))

    def _take(self, link: ReplicaLink, hello: Hello, asked: PutCopy) -> None:
        copy = asked.copy
        if hello.round < self._context.round:
            now = self._context.round
            raise ReplicaError(f"round {hello.round} is over, the job is at round {now}", "round")
        began = time.monotonic()
        try:
            incoming = self._store.begin(copy, ImageSender(hello.round, asked.restored, link.abort))
        except OSError as error:
            raise ReplicaError(f"there is no room for it: {error}", "room") from error
        if incoming is None:
            link.say(SendFrom(offset=copy.size_bytes, is_whole=True))
            return
        try:
            link.within(self._context.limit_s(copy.size_bytes - incoming.offset))
            link.say(SendFrom(offset=incoming.offset))
            link.receive(incoming)
            held = self._store.finish(incoming)
        finally:
            self._store.pause(incoming)
        self._arrived(held, hello.node, time.monotonic() - began)
        link.say(StoredAnswer())

    def _copies(self, ranks: tuple[int, ...]) -> list[Copy]:
        copies = [held.copy for rank in ranks for held in self._store.of_rank(rank)]
        for rank in ranks:
            slot, count = self._context.slot_of(rank) or (-1, 0)
            copies += [image.copy(slot, count) for image in self._images.of(rank)]
        return copies

    def _give(self, link: ReplicaLink, asked: GetCopy) -> None:
        copy = asked.copy
        path = self._path_of(copy)
        if path is None or not 0 <= asked.offset <= copy.size_bytes:
            raise ReplicaError(f"step {copy.step} of rank {copy.rank} is not here", "unknown")
        octets = MappedFiles().of(path, copy.size_bytes)
        link.within(self._context.limit_s(copy.size_bytes - asked.offset))
        link.say(BytesFollow(size_bytes=copy.size_bytes))
        link.send(octets[asked.offset :])

    def _path_of(self, copy: Copy) -> Path | None:
        held = [
            (held_copy.copy.hash, held_copy.path) for held_copy in self._store.of_rank(copy.rank)
        ]
        own = [(image.head.hash, image.path) for image in self._images.of(copy.rank)]
        return dict([*own, *held]).get(copy.hash)
