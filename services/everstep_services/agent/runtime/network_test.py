"""Measures the network with other nodes of the job, in the turns that rendezvous has ordered."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from msgspec.structs import replace

from everstep.clock import Clock
from everstep.messages import (
    Fact,
    MeasureNetwork,
    NetworkFigures,
    NetworkLink,
    NetworkMeasured,
    NetworkPeer,
)
from everstep.node_pairs import schedule
from everstep.settings import remember_secret
from everstep_services.agent.probes.network import pair_test
from everstep_services.agent.probes.network.collectives import Pair, PairEnd, Sums
from everstep_services.agent.probes.network.pair_test import (
    Address,
    NetworkCheckError,
    PeerSilentError,
    PortTakenError,
)
from everstep_services.agent.telemetry.facts import AgentFacts

log = logging.getLogger(__name__)

_LEAD_S = 1.0
"""Before the first turn: all agents have the order by then."""
_AGAIN_S = 0.1
"""The other node may open its port a little later."""


@dataclass(eq=False, repr=False)
class NetworkTestRunner:
    """Runs one test after the other. Each agent counts the turns from when it heard the order."""

    _node: str
    _clock: Clock
    _records: AgentFacts
    _record: Callable[[Fact], None]
    _number_of_ends: int = 1
    """The number of processes that add numbers: one for each GPU."""
    _done: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self._wanted: asyncio.Queue[tuple[MeasureNetwork, float]] = asyncio.Queue()
        self._newest = ""
        self._summing: asyncio.Task[None] | None = None
        self.figures: NetworkFigures | None = None
        """Of the last test."""

    def ask(self, order: MeasureNetwork) -> None:
        """Some nodes of the job must measure; this node may be among them."""
        remember_secret(order.token)
        if order.id == self._newest or all(peer.node != self._node for peer in order.peers):
            return  # each replica of rendezvous may send it
        self._newest = order.id
        self.give_way()
        self._wanted.put_nowait((order, self._clock.now()))

    def give_way(self) -> None:
        """Ranks start, or another test begins: end a test for which a round waited."""
        if self._summing is not None:
            self._summing.cancel()

    async def measure_for_ever(self) -> None:
        """Take each turn of each test that is ordered, and record the figures."""
        while True:
            order, heard_at = await self._wanted.get()
            async with asyncio.TaskGroup() as tasks:
                measuring = tasks.create_task(self._measure(order, heard_at))
                self._summing = measuring if order.has_sums else None

    async def _measure(self, order: MeasureNetwork, heard_at: float) -> None:
        ends = [PairEnd(number) for number in range(self._number_of_ends * order.has_sums)]
        try:
            for end in ends:
                await end.start()
            links, reason = await self._measured(order, heard_at, ends)
        finally:  # before ranks need the GPUs
            await asyncio.gather(*(end.stop() for end in ends))
        log.info("network_measured test=%s links=%d reason=%s", order.id, len(links), reason)
        fact = NetworkMeasured(
            **self._records.of_job(), node=self._node, test=order.id,
            nodes=tuple(peer.node for peer in order.peers), links=tuple(links), reason=reason,
            took_s=round(self._clock.now() - heard_at, 3),
        )  # fmt: skip
        self._record(fact)
        self.figures = NetworkFigures(
            test=order.id, node=self._node, fact=fact.id, links=tuple(links), reason=reason
        )
        self._done()

    async def _measured(
        self, order: MeasureNetwork, heard_at: float, ends: Sequence[PairEnd]
    ) -> tuple[list[NetworkLink], str]:
        """The figures of this node, and why it could not be reached, if so."""
        peers = {peer.node: peer for peer in order.peers}
        links: list[NetworkLink] = []
        reason = ""
        for number, turn in enumerate(islice(schedule(list(peers)), order.turns)):
            until = heard_at + _LEAD_S + order.lead_s + (number + 1) * order.turn_s
            pair = next((pair for pair in turn if self._node in pair), None)
            if pair is None:
                continue
            wait_s = until - order.turn_s - self._clock.now()
            if wait_s < -order.turn_s / 2:
                reason = "another test was still going on"
                continue
            if not ends:  # with them a test ends as early as it can: partners wait for each other
                await self._clock.sleep(max(wait_s, 0.0))
            caller, called = pair
            to, token = peers[called], order.token.encode()
            if caller == self._node:
                link = await self._call(to, token, until)
                if link.mib_s and ends:
                    sums = await self._sums(ends, to, order, until, is_peer=True)
                    link = _with_sums(link, sums)
                links.append(link)
            else:
                trouble, was_served = await self._let_in(to, token, until)
                reason = trouble or reason
                if was_served and ends:
                    await self._sums(ends, to, order, until, is_peer=False)
        return links, reason

    async def _sums(
        self, ends: Sequence[PairEnd], to: NetworkPeer, order: MeasureNetwork, until: float,
        *, is_peer: bool,
    ) -> Sums:  # fmt: skip
        """The slowest sums of all GPUs, which add at the same time."""
        within_s = max(until - self._clock.now(), _AGAIN_S)
        pair = Pair(int(is_peer), to.address, to.port, "", within_s, order.turn_s)
        sums_of_gpus = await asyncio.gather(*(end.add(pair) for end in ends))
        return min(sums_of_gpus, key=lambda sums: sums.mib_s)

    async def _call(self, peer: NetworkPeer, token: bytes, ends: float) -> NetworkLink:
        to, why = Address(peer.address, peer.port), ""
        while (left_s := ends - self._clock.now()) > _AGAIN_S:
            try:
                figures = await pair_test.measure(to, token, within_s=left_s)
            except PeerSilentError as error:
                why = why or str(error)  # at the end of the turn, no time is left for an answer
            except NetworkCheckError as error:
                why = str(error)
            else:
                return NetworkLink(
                    node=peer.node,
                    mib_s=round(figures.mib_s, 1),
                    round_trip_s=round(figures.round_trip_ms / 1e3, 6),
                )
            await self._clock.sleep(_AGAIN_S)
        reason = why or "its turn was over before it could be called"
        return NetworkLink(node=peer.node, mib_s=0.0, reason=reason)

    async def _let_in(self, own: NetworkPeer, token: bytes, ends: float) -> tuple[str, bool]:
        """Why no caller could be served, and whether one was: it may not have come."""
        everywhere = "::" if ":" in own.address else "0.0.0.0"  # noqa: S104  the caller needs the token
        within_s = ends - self._clock.now()
        try:
            at = Address(everywhere, own.port)
            await pair_test.listen(at, token, within_s=within_s, ready=lambda _: None)
        except PortTakenError as error:
            return str(error), False
        except NetworkCheckError as error:
            log.info("network_caller_missing error=%s", error)
            return "", False
        return "", True


def _with_sums(link: NetworkLink, sums: Sums) -> NetworkLink:
    reason = sums.trouble or sums.wrong
    if reason and sums.backend:
        reason = f"{sums.backend}: {reason}"
    return replace(
        link, backend=sums.backend, sums_mib_s=round(sums.mib_s, 1), reason=reason or link.reason
    )
