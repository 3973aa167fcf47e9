"""The nodes of the cluster, kept up to date by a watch; and whether the API server is there."""

import asyncio
import logging
from collections.abc import Mapping

from everstep.backoff import Backoff, jittered_s
from everstep.clock import Clock
from everstep_services.kubernetes.api_server import (
    ApiServer,
    ApiServerError,
    ApiServerRefusalError,
    NodeChange,
    VersionExpiredError,
)
from everstep_services.kubernetes.domain.nodes import ClusterNode
from everstep_services.kubernetes.settings import KubernetesSettings

log = logging.getLogger(__name__)
_FIRST_S = 1.0


class NodeCache:
    """Lists all nodes, then follows changes; lists again only where the server has forgotten."""

    def __init__(self, settings: KubernetesSettings, clock: Clock) -> None:
        self._settings = settings
        self._clock = clock
        self._nodes: dict[str, ClusterNode] = {}
        self._version = ""
        self._trouble: type[ApiServerError] | None = None
        self._backoff = Backoff(_FIRST_S, settings.retry_most_s)
        self.changed = asyncio.Event()
        """Set after each change."""
        self.listed_total = 0

    @property
    def nodes(self) -> Mapping[str, ClusterNode]:
        """The nodes by name, as they were last seen."""
        return self._nodes

    @property
    def version(self) -> str:
        """The version after which it watches."""
        return self._version

    @property
    def is_current(self) -> bool:
        """Whether they were listed, and the API server answers."""
        return bool(self.listed_total) and self._trouble is None

    async def follow_for_ever(self) -> None:
        """Keep the nodes up to date until cancelled, through every loss of the API server."""
        while True:
            try:
                async with ApiServer(self._settings) as server:
                    await self._follow(server)
            except VersionExpiredError:
                self._version = ""  # list again, at once
                await self._clock.sleep(jittered_s(_FIRST_S))
            except ApiServerError as error:
                self._failed(error)
                await self._clock.sleep(jittered_s(self._backoff.failed()))

    async def _follow(self, server: ApiServer) -> None:
        while True:
            if not self._version:
                listed, self._version = await server.list_nodes()
                self._nodes = {node.name: node for node in listed}
                self.listed_total += 1
                self._works()
            begun_s = self._clock.now()
            async for change in server.watch_nodes(self._version):
                self._works()
                self._apply(change)
            self._works()
            if self._clock.now() - begun_s < _FIRST_S:  # something ends watches at once
                await self._clock.sleep(_FIRST_S)

    def take(self, node: ClusterNode) -> None:
        """Take over a node that was just read or changed."""
        self._nodes[node.name] = node

    def _apply(self, change: NodeChange) -> None:
        if change.version:
            self._version = change.version
        match change.kind, change.node:
            case "put", ClusterNode() as node:
                self._nodes[node.name] = node
            case "gone", ClusterNode() as node:
                self._nodes.pop(node.name, None)
            case _:
                return
        self.changed.set()

    def _works(self) -> None:
        self._backoff.reset()
        if self._trouble is not None:
            log.info("api_server_back")
            self._trouble = None
        self.changed.set()

    def _failed(self, error: ApiServerError) -> None:
        kind = ApiServerRefusalError if isinstance(error, ApiServerRefusalError) else ApiServerError
        if self._trouble is not kind:
            log.warning(
                "api_server_away error=%s effect=nodes are neither excluded nor marked; training "
                "goes on",
                error,
            )
            self._trouble = kind
