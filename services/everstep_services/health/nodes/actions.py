"""The actions on nodes and switches that people request."""

from datetime import datetime, timedelta

from everstep.bus.facts.recorder import Recorder
from everstep.bus.ports import Bus
from everstep.bus.requests import RefusalError
from everstep.clock import Clock
from everstep.ids import checked_name, new_id
from everstep.messages import (
    ControlChanged,
    ControlDocument,
    Done,
    ExcludeNode,
    Exclusion,
    IncludeNode,
    NodeExcluded,
    NodeIncluded,
    SetControl,
)
from everstep.messages.facts.stamp import FactHead
from everstep.subjects import CLUSTER
from everstep_services.health.nodes.control import (
    binds,
    others_by,
    switched,
    value_of,
    with_exclusion,
    without_exclusion,
)
from everstep_services.health.nodes.control_documents import ControlDocuments
from everstep_services.health.nodes.exclusions import close_breaker, pardon
from everstep_services.health.nodes.service import NodeService
from everstep_services.health.settings import NodeSettings

_HEALTH = "health"
_BREAKER = "breaker"
_SERVICE = "service"
"""The origin of what policies request: it may exclude a share of the nodes only."""
_LONGEST_S = 10 * 365 * 86400.0


class OperatorActions:
    """Each changes documents by compare-and-set, so that any replica can carry it out."""

    def __init__(
        self, settings: NodeSettings, bus: Bus, clock: Clock, records: Recorder, nodes: NodeService
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._records = records
        self._nodes = nodes
        self._control = ControlDocuments(bus)

    async def exclude(self, ask: ExcludeNode) -> Done:
        """Keep a node out of every round."""
        _check(ask)
        ttl_s = self._settings.exclude_ttl_s if ask.ttl_s is None else ask.ttl_s
        exclusion = Exclusion(node=ask.node, by=ask.by, reason=ask.reason, until=self._until(ttl_s))
        most = max(1, int(self._settings.breaker_ratio * self._nodes.count()))

        def edit(document: ControlDocument) -> ControlDocument:
            made = others_by(document, exclusion, self._clock.wall())
            is_refused = ask.origin == _SERVICE and made >= most
            return document if is_refused else with_exclusion(document, exclusion)

        _, after, _ = await self._control.change(CLUSTER, edit)
        if exclusion not in after.exclusions:
            why = f"{ask.by} has excluded {most} nodes, the most of {self._nodes.count()}"
            return Done(text=f"{why}: include one first", is_refused=True)
        mode = "enforce" if binds(after) else "observe"
        self._records.keep(
            NodeExcluded(
                **self._head(ask),
                reason=ask.reason,
                node=ask.node,
                by=ask.by,
                ttl_s=ttl_s or None,
                mode=mode,
            )
        )
        time = f"for {ttl_s:g} s" if ttl_s else "until somebody includes it"
        if mode == "observe":
            return Done(text=f"{ask.node} is excluded {time}, but exclusions are only observed now")
        return Done(text=f"{ask.node} joins no round {time}; one that it is in goes on")

    async def include(self, ask: IncludeNode) -> Done:
        """Let a node join again, and drop the evidence against it."""
        _check(ask)
        # First drop the evidence; otherwise health would exclude the node again.
        await self._nodes.change(lambda register, _: pardon(register, ask.node))
        before, after, _ = await self._control.change(
            CLUSTER, lambda document: without_exclusion(document, ask.node, ask.by, ask.reason)
        )
        if before == after:
            return Done(text=f"{ask.node} is not excluded; the evidence against it is dropped")
        self._records.keep(
            NodeIncluded(**self._head(ask), reason=ask.reason, node=ask.node, by=ask.by)
        )
        return Done(text=f"{ask.node} may join again; the evidence against it is dropped")

    async def switch(self, ask: SetControl) -> Done:
        """Change switches, or close the breaker."""
        changes = dict(ask.changes)
        closes = changes.pop(_BREAKER, None)
        if closes is not None and (closes, ask.job) != ("closed", CLUSTER):
            raise RefusalError(
                "422", f"breaker cannot be {closes!r} for {ask.job}: only 'closed', for {CLUSTER}"
            )
        before, after, revision = await self._control.change(
            ask.job, lambda document: switched(document, changes, ask.by, ask.reason)
        )
        changed: list[str] = []
        for name in changes:
            old, new = value_of(before, name), value_of(after, name)
            if old != new:
                changed.append(name)
                self._record_change(ask, name, old, new, revision)
        if closes:
            is_closed: bool = await self._nodes.change(
                lambda register, now: close_breaker(register, ask.by, ask.reason, now)
            )
            if is_closed:
                changed.append(_BREAKER)
                self._record_change(ask, _BREAKER, "open", "closed")
        return Done(text=f"changed: {', '.join(changed)}" if changed else "nothing has changed")

    def _record_change(
        self, ask: SetControl, name: str, before: str, after: str, revision: int | None = None
    ) -> None:
        self._records.keep(
            ControlChanged(
                **self._head(ask),
                name=name,
                before=before,
                after=after,
                by=ask.by,
                reason=ask.reason,
                origin=ask.origin,
                revision=revision,
            )
        )

    def _head(self, ask: ExcludeNode | IncludeNode | SetControl) -> FactHead:
        return {"id": new_id(), "job": ask.job, "at": self._clock.wall(), "source": _HEALTH}

    def _until(self, ttl_s: float) -> datetime | None:
        if not 0 <= ttl_s <= _LONGEST_S:
            text = f"health cannot exclude a node for {ttl_s:g} s: give seconds, or 0 for no end"
            raise RefusalError("422", text)
        return self._clock.wall() + timedelta(seconds=ttl_s) if ttl_s else None


def _check(ask: ExcludeNode | IncludeNode) -> None:
    if ask.job != CLUSTER:
        raise RefusalError("403", f"an exclusion holds for all jobs: name {CLUSTER} as the job")
    if ask.by == _HEALTH:
        raise RefusalError("422", "health is the name of this service: give your own")
    checked_name("node", ask.node)
