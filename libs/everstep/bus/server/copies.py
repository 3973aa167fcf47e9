"""What the leaders of the streams tell about the servers of a cluster, for people and metrics."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from everstep.bus.errors import BusError
from everstep.bus.jetstream import JetStream

log = logging.getLogger(__name__)

LAG_MOST = 1000
"""A copy that lacks more messages than this lags."""
_AWAY_AFTER_NS = 10_000_000_000
"""A leader that has not heard a copy for longer: servers call it offline only after minutes."""
_LOOK_EVERY_S = 15.0


@dataclass(frozen=True, slots=True)
class Copies:
    """The state of all copies; streams without copies are not part of it."""

    servers: frozenset[str]
    without_leader: Sequence[str]
    """Streams that nobody can write."""
    away: Mapping[str, Sequence[str]]
    """Servers that are away, and the streams that lack their copies."""
    lagging: Mapping[str, Sequence[str]]
    """The same of servers whose copies lag."""
    lag: int
    """The most messages that a copy lacks."""


def examine(streams: Sequence[Mapping[str, Any]], missing: Sequence[str]) -> Copies:
    """From the answer to `STREAM.LIST`, in which streams without a leader may be `missing`."""
    groups = {str(stream["config"]["name"]): stream.get("cluster") or {} for stream in streams}
    has_copies = any(int(stream["config"]["num_replicas"]) > 1 for stream in streams)
    leaderless = [name for name, group in groups.items() if not group.get("leader")]
    servers = {str(group["leader"]) for group in groups.values() if group.get("leader")}
    behind: dict[str, list[str]] = {}
    away: set[str] = set()
    lag = 0
    for name, group in sorted(groups.items()):
        for copy in group.get("replicas") or ():
            servers.add(copy["name"])
            lag = max(lag, copy.get("lag", 0))
            is_away = copy.get("offline") or copy.get("active", 0) > _AWAY_AFTER_NS
            if is_away:
                away.add(copy["name"])
            if is_away or not copy.get("current") or copy.get("lag", 0) > LAG_MOST:
                behind.setdefault(copy["name"], []).append(name)
    # A leader elected after a server went has never heard it, and tells no age of its silence.
    lagging = {server: names for server, names in behind.items() if server not in away}
    without = sorted({*missing, *leaderless}) if has_copies or missing else []
    return Copies(
        frozenset(servers), without, {server: behind[server] for server in away}, lagging, lag
    )


class ServerWatch:
    """Looks at the copies again and again, for metrics."""

    def __init__(self, jetstream: JetStream) -> None:
        self._jetstream = jetstream
        self._levels = dict.fromkeys(
            ("seen", "away", "lagging", "lag_messages", "streams_without_leader", "store_ratio"),
            0.0,
        )

    def statistics(self) -> dict[str, float]:
        """The state at the last look that was answered."""
        return dict(self._levels)

    async def look_for_ever(self) -> None:
        """Look every 15 s; without an answer the last state stays."""
        while True:
            await self._jetstream.connection.wait_connected()
            try:
                answer = await self._jetstream.api("STREAM.LIST")
            except BusError as error:
                log.info("servers_not_seen error=%s", error)
            else:
                streams = answer.get("streams") or ()
                self._note(examine(streams, answer.get("missing") or ()), _fullest(streams))
            await asyncio.sleep(_LOOK_EVERY_S)

    def _note(self, copies: Copies, store_ratio: float) -> None:
        self._levels = {
            "seen": float(len(copies.servers)),
            "away": float(len(copies.away)),
            "lagging": float(len(copies.lagging)),
            "lag_messages": float(copies.lag),
            "streams_without_leader": float(len(copies.without_leader)),
            "store_ratio": store_ratio,
        }


def _fullest(streams: Sequence[Mapping[str, Any]]) -> float:
    """How full the fullest stream is of those that refuse what does not fit."""
    return max(
        (
            stream["state"]["bytes"] / stream["config"]["max_bytes"]
            for stream in streams
            if stream["config"].get("discard") == "new" and stream["config"]["max_bytes"] > 0
        ),
        default=0.0,
    )
