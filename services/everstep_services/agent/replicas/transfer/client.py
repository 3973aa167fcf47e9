"""Calls to other agents: send a state, ask for their copies, fetch one. Call all in threads."""

import socket
import ssl
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from everstep.messages import Peer
from everstep_services.agent.replicas.store import Incoming
from everstep_services.agent.replicas.transfer.context import TransferContext
from everstep_services.agent.replicas.transfer.protocol import (
    AskHolding,
    BytesFollow,
    Copy,
    GetCopy,
    HoldingAnswer,
    PutCopy,
    ReplicaError,
    ReplicaLink,
    SendFrom,
    StoredAnswer,
)
from everstep_services.agent.replicas.transfer.tls import refusal
from trainer_sdk.checkpoint.image_folder import RestoredState

_CONNECTS_WITHIN_S = 3.0
_ANSWERS_WITHIN_S = 30.0


class Call:
    """One connection to one agent; opened on entry. `abort` may come from another thread.

    Every failure is raised as a `ReplicaError` that names the node.
    """

    def __init__(self, to: Peer, context: TransferContext) -> None:
        self._to = to
        self._context = context
        self._link: ReplicaLink | None = None
        self._is_over = False
        self._is_in = False
        """The other agent has accepted our proof, and given its own."""

    def abort(self) -> None:
        """End every wait on the connection, even while it is being made."""
        self._is_over = True
        if self._link is not None:
            self._link.abort()

    def __enter__(self) -> Self:
        try:
            self._open()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _open(self) -> None:
        to, context = self._to, self._context
        family, kind, number, _, place = socket.getaddrinfo(
            to.address, to.port, type=socket.SOCK_STREAM
        )[0]
        self._link = link = ReplicaLink(
            socket.socket(family, kind, number), silent_s=context.settings.silent_s
        )
        if self._is_over:
            raise EOFError
        link.connect(place, _CONNECTS_WITHIN_S)
        link.within(_ANSWERS_WITHIN_S)
        if context.tls is not None:
            link.secure(context.tls, is_caller=True)
        link.prove(context.key, is_caller=True)
        self._is_in = True
        link.say(context.hello())

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._link is not None:
            self._link.close()
        if isinstance(error, TimeoutError | BlockingIOError):
            text = f"it neither took nor sent anything for {self._context.settings.silent_s:g} s, "
            raise ReplicaError(f"{self._place}: {text}or was too slow", "slow") from error
        if isinstance(error, ssl.SSLError):
            raise ReplicaError(f"{self._place}: {refusal(error)}", "tls") from error
        if isinstance(error, EOFError | ConnectionResetError | BrokenPipeError):
            text = "it has closed the connection" + ("" if self._is_in else self._unheard)
            raise ReplicaError(f"{self._place}: {text}", "closed") from error
        if isinstance(error, OSError):
            raise ReplicaError(
                f"{self._place}: {error.strerror or error}", "unreachable"
            ) from error
        if isinstance(error, ReplicaError):
            raise ReplicaError(f"{self._place}: {error}", error.cause) from error

    @property
    def _place(self) -> str:
        return f"{self._to.node} at {self._to.address}:{self._to.port}"

    @property
    def _unheard(self) -> str:
        speaks = "" if self._context.tls is not None else ", or speaks TLS, and we do not"
        return f" before we were heard: it is of another job{speaks}, or too slow"

    def put(self, copy: Copy, octets: memoryview, restored: RestoredState | None = None) -> None:
        """Send a state that is whole in memory; on return the other agent has it, verified."""
        link = self._ready()
        link.say(PutCopy(copy=copy, restored=restored))
        answer = link.hear_answer(SendFrom)
        if answer.is_whole:
            return
        link.within(self._context.limit_s(copy.size_bytes - answer.offset))
        link.send(octets[answer.offset :])
        link.hear_answer(StoredAnswer)

    def ask(self, ranks: Sequence[int]) -> tuple[Copy, ...]:
        """The copies that the other agent has of these ranks."""
        link = self._ready()
        link.say(AskHolding(ranks=tuple(ranks)))
        return link.hear_answer(HoldingAnswer).copies

    def get(self, incoming: Incoming) -> None:
        """Fetch the rest of a state."""
        link, copy = self._ready(), incoming.copy
        link.say(GetCopy(copy=copy, offset=incoming.offset))
        link.hear_answer(BytesFollow)
        link.within(self._context.limit_s(copy.size_bytes - incoming.offset))
        link.receive(incoming)

    def _ready(self) -> ReplicaLink:
        assert self._link is not None
        self._link.within(_ANSWERS_WITHIN_S)
        return self._link
