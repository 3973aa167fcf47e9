"""Measures the network with other nodes of the job, in the turns that rendezvous has ordered."""

import asyncio
import logging
from collections.abc import Callable
from itertools import islice

from everstep.clock import Clock
from everstep.messages import Fact, MeasureNetwork, NetworkLink, NetworkPeer
from everstep.settings import remember_secret
from everstep_services.agent.probes.network import pair_test
from everstep_services.agent.probes.network.pair_test import (
    Address,
    NetworkCheckError,
    PeerSilentError,
    PortTakenError,
)
from everstep_services.agent.probes.network.pairs import schedule
from everstep_services.agent.telemetry.facts import AgentFacts

log = logging.getLogger(__name__)

_LEAD_S = 1.0
"""Before the first turn: all agents have the order by then."""
_AGAIN_S = 0.1
"""The other node may open its port a little later."""


class NetworkTestRunner:
    """Runs one test after the other. Each agent counts the turns from when it heard the order."""

    def __init__(
        self, node: str, clock: Clock, records: AgentFacts, record: Callable[[Fact], None]
    ) -> None:
        self._node = node
        self._clock = clock
        self._records = records
        self._record = record
        self._wanted: asyncio.Queue[tuple[MeasureNetwork, float]] = asyncio.Queue()

    def ask(self, order: MeasureNetwork) -> None:
        """Some nodes of the job must measure; this node may be among them."""
        remember_secret(order.token)
        if any(peer.node == self._node for peer in order.peers):
            self._wanted.put_nowait((order, self._clock.now()))

    async def measure_for_ever(self) -> None:
        """Take each turn of each test that is ordered, and record the figures."""
        while True:
            order, heard_at = await self._wanted.get()
            links, reason = await self._measured(order, heard_at)
            log.info("network_measured test=%s links=%d reason=%s", order.id, len(links), reason)
            took_s = self._clock.now() - heard_at
            self._record(self._records.network_measured(order, links, reason, took_s))

    async def _measured(
        self, order: MeasureNetwork, heard_at: float
    ) -> tuple[list[NetworkLink], str]:
        """The figures of this node, and why it could not be reached, if so."""
        peers = {peer.node: peer for peer in order.peers}
        links: list[NetworkLink] = []
        reason = ""
        for number, turn in enumerate(islice(schedule(list(peers)), order.turns)):
            ends = heard_at + _LEAD_S + (number + 1) * order.turn_s
            pair = next((pair for pair in turn if self._node in pair), None)
            if pair is None:
                continue
            wait_s = ends - order.turn_s - self._clock.now()
            if wait_s < -order.turn_s / 2:
                reason = "another test was still going on"
                continue
            await self._clock.sleep(max(wait_s, 0.0))
            caller, called = pair
            if caller == self._node:
                links.append(await self._call(peers[called], order.token.encode(), ends))
            else:
                reason = await self._let_in(peers[called], order.token.encode(), ends) or reason
        return links, reason

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

    async def _let_in(self, own: NetworkPeer, token: bytes, ends: float) -> str:
        """Why the caller could not be served; empty if it was, or did not come."""
        everywhere = "::" if ":" in own.address else "0.0.0.0"  # noqa: S104  the caller needs the token
        within_s = ends - self._clock.now()
        try:
            at = Address(everywhere, own.port)
            await pair_test.listen(at, token, within_s=within_s, ready=lambda _: None)
        except PortTakenError as error:
            return str(error)
        except NetworkCheckError as error:
            log.info("network_caller_missing error=%s", error)
        return ""
