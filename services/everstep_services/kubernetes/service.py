"""Turns signs of nodes into exclusions and drains, and exclusions into marks."""

import asyncio
import logging
from collections import Counter
from collections.abc import Collection, Mapping

from everstep.bus.leader_election import Term, lead_for_ever
from everstep.bus.ports import Bus
from everstep.clock import Clock
from everstep.errors import EverstepError
from everstep.messages import Exclusion, NodeStanding
from everstep.runtime import Loop
from everstep_services.kubernetes.api_server import (
    ApiServer,
    ApiServerError,
    ApiServerRefusalError,
    ChangedMeanwhileError,
)
from everstep_services.kubernetes.domain.nodes import (
    ClusterNode,
    ClusterSign,
    ambiguous,
    marked,
    marks,
    reaction_to,
    sign_of,
    unmarked,
)
from everstep_services.kubernetes.exclusions import BY, ExclusionList, Exclusions, is_due
from everstep_services.kubernetes.node_cache import NodeCache
from everstep_services.kubernetes.settings import KubernetesSettings

log = logging.getLogger(__name__)
_LEASE = "kubernetes-nodes"
_RENEW_S = 2.0


class NodeWatcher:
    """One replica. All follow the nodes; the one with the lease acts."""

    def __init__(self, settings: KubernetesSettings, bus: Bus, clock: Clock) -> None:
        self._settings = settings
        self._bus = bus
        self._clock = clock
        self._exclusions = Exclusions(bus, clock)
        self._drained: dict[str, set[str]] = {}
        """The jobs that were asked to let a node go, while it has its sign."""
        self._logged: set[tuple[str, ...]] = set()
        self._counts = Counter[str]()
        self._leads = False
        self.cache = NodeCache(settings, clock)

    @property
    def loops(self) -> tuple[Loop, ...]:
        """What the process runs until it ends."""
        return (self.cache.follow_for_ever, self.act_for_ever)

    def statistics(self) -> dict[str, float]:
        """The numbers for metrics."""
        nodes = self.cache.nodes.values()
        return {
            "nodes": float(len(nodes)),
            "nodes_marked": float(sum(node.is_marked for node in nodes)),
            "nodes_signed": float(
                sum(sign_of(node, self._settings).kind != "none" for node in nodes)
            ),
            "api_server_answers": float(self.cache.is_current),
            "leading": float(self._leads),
            "listed_total": float(self.cache.listed_total),
            **{
                f"{name}_total": float(self._counts[name])
                for name in ("excluded", "included", "drained", "marked", "unmarked", "failed")
            },
        }

    async def act_for_ever(self) -> None:
        """Act whenever this replica has the lease, until cancelled."""
        await lead_for_ever(self._bus, self._clock, _LEASE, self._act)

    async def _act(self, term: Term) -> None:
        self._leads = True
        try:
            looked_s: float | None = None
            while True:
                await term.renew()
                now = self._clock.now()
                is_due_now = looked_s is None or now - looked_s >= self._settings.look_every_s
                if is_due_now or self.cache.changed.is_set():
                    looked_s = now
                    self.cache.changed.clear()
                    await self._look_and_log()
                await self._wait_for_change()
        finally:
            self._leads = False

    async def _wait_for_change(self) -> None:
        try:
            async with asyncio.timeout(min(_RENEW_S, self._settings.look_every_s)):
                await self.cache.changed.wait()
        except TimeoutError:
            pass

    async def _look_and_log(self) -> None:
        try:
            await self.look()
            self._logged = {key for key in self._logged if key[0] != "look_failed"}
        except ApiServerError as error:
            self._counts["failed"] += 1
            self._log_once("look_failed", type(error).__name__, text=str(error))
        except (EverstepError, TimeoutError) as error:  # the bus, or a service, is away
            self._counts["failed"] += 1
            self._log_once("look_failed", type(error).__name__, text=f"{error}: tried again")

    async def look(self) -> None:
        """Compare nodes with exclusions, once, in both directions."""
        if not self.cache.is_current:
            return
        nodes = self._distinct()
        exclusions = await self._exclusions.read()
        await self._inward(nodes, exclusions)
        await self._outward(nodes, exclusions)

    def _distinct(self) -> dict[str, ClusterNode]:
        """The nodes by their ids in Everstep, without those whose ids are the same."""
        nodes = list(self.cache.nodes.values())
        clashes = ambiguous(nodes)
        for id, names in clashes.items():
            self._log_once(
                "node_ids_clash",
                id,
                text=f"the nodes {', '.join(names[:3])} have the same id in Everstep, {id}: "
                f"neither is excluded nor marked",
            )
        return {node.id: node for node in nodes if node.id not in clashes}

    # -- from the cluster into Everstep ------------------------------------------------------------

    async def _inward(self, nodes: Mapping[str, ClusterNode], exclusions: ExclusionList) -> None:
        signs = {id: sign_of(node, self._settings) for id, node in nodes.items()}
        acted = {
            id: sign for id, sign in signs.items() if reaction_to(sign, self._settings) != "ignore"
        }
        ours = {
            id
            for id, exclusion in exclusions.by_node.items()
            if exclusion.by == BY and id in nodes and id not in acted
        }
        self._drained = {id: jobs for id, jobs in self._drained.items() if id in acted}
        standings = await self._exclusions.standings(tuple(sorted({*acted, *ours})))
        for id in sorted(acted):
            standing = standings.get(id)
            if standing is not None and standing.state != "unknown":  # else it trains nothing
                await self._exclude(id, acted[id], exclusions.by_node.get(id))
        await self._drain(acted, standings)
        for id in sorted(ours):
            await self._include(id, standings.get(id))

    async def _exclude(self, id: str, sign: ClusterSign, exclusion: Exclusion | None) -> None:
        if not is_due(exclusion, self._clock, self._settings.exclude_for_s):
            return
        text = await self._exclusions.exclude(id, sign.reason, self._settings.exclude_for_s)
        self._counts["excluded"] += 1
        log.info("node_excluded node=%s reason=%s answer=%s", id, sign.reason, text)

    async def _include(self, id: str, standing: NodeStanding | None) -> None:
        if standing is None or standing.strikes or standing.failing:
            # Its inclusion would also drop the evidence against it: the exclusion ends by itself.
            self._log_once("exclusion_left", id, text=f"the exclusion of {id} ends with its time")
            return
        text = await self._exclusions.include(id, f"{id} has no sign in Kubernetes any more")
        self._counts["included"] += 1
        log.info("node_included node=%s answer=%s", id, text)

    async def _drain(
        self, acted: Mapping[str, ClusterSign], standings: Mapping[str, NodeStanding]
    ) -> None:
        leaving = frozenset(
            id
            for id, sign in acted.items()
            if reaction_to(sign, self._settings) == "drain"
            and (standing := standings.get(id)) is not None
            and standing.silence_s is not None  # an agent is there
        )
        if not leaving:
            return
        for id, jobs in (await self._exclusions.jobs_on(leaving)).items():
            for job in jobs:
                asked = self._drained.setdefault(id, set())
                if job not in asked:
                    text = await self._exclusions.drain(
                        job, id, acted[id].reason, self._settings.save_within_s
                    )
                    asked.add(job)
                    self._counts["drained"] += 1
                    log.info("node_drained node=%s job=%s answer=%s", id, job, text)

    # -- from Everstep into the cluster ------------------------------------------------------------

    async def _outward(self, nodes: Mapping[str, ClusterNode], exclusions: ExclusionList) -> None:
        if exclusions.is_braked:
            return
        excluded: dict[str, Exclusion] = {}
        if exclusions.binds:
            excluded = {id: each for id, each in exclusions.by_node.items() if each.by != BY}
        planned = marks(nodes.values(), excluded, self._settings.marks_most)
        for name in planned.held_back:
            self._log_once(
                "mark_held_back",
                name,
                text=f"{name} is excluded and stays unmarked: {self._settings.marks_most} nodes "
                f"are marked, the most that marks_most in [kubernetes] allows",
            )
        if self._settings.marks == "observe":
            self._observe(planned.add, planned.remove)
            return
        async with ApiServer(self._settings) as server:
            for name in planned.remove:
                await self._mark(server, self.cache.nodes[name], {})
            for name in planned.add:
                await self._mark(server, self.cache.nodes[name], excluded)

    def _observe(self, add: Collection[str], remove: Collection[str]) -> None:
        for name in add:
            self._log_once("node_would_be_marked", name, text=f"{name} is excluded in Everstep")
        for name in remove:
            self._log_once("node_keeps_its_mark", name, text=f"{name} has a mark of earlier times")

    async def _mark(
        self, server: ApiServer, node: ClusterNode, excluded: Mapping[str, Exclusion]
    ) -> None:
        try:
            await self._patch(server, node, excluded)
        except ChangedMeanwhileError:  # decide again by what it is now
            try:
                await self._patch(server, await server.node(node.name), excluded)
            except ChangedMeanwhileError:
                self.cache.changed.set()
        except ApiServerRefusalError as error:
            self._counts["failed"] += 1
            self._log_once("mark_refused", text=str(error))

    async def _patch(
        self, server: ApiServer, node: ClusterNode, excluded: Mapping[str, Exclusion]
    ) -> None:
        exclusion = excluded.get(node.id)
        if exclusion is None:
            self.cache.take(await server.patch_node(node.name, unmarked(node)))
            self._counts["unmarked"] += 1
            log.info("node_unmarked node=%s", node.name)
            return
        if node.is_marked or node.spec.unschedulable:
            self.cache.take(node)
            return
        reason = f"{exclusion.by}: {exclusion.reason}"
        patch = marked(node, self._settings.marks, reason)
        self.cache.take(await server.patch_node(node.name, patch))
        self._counts["marked"] += 1
        log.info("node_marked node=%s mark=%s reason=%s", node.name, self._settings.marks, reason)

    def _log_once(self, *key: str, text: str) -> None:
        if key not in self._logged:
            self._logged.add(key)
            log.warning("%s %s", key[0], text)
