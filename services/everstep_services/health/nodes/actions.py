"""What people have health do to nodes and switches."""

from datetime import datetime, timedelta
from typing import Any

from everstep.bus.asking import RefusalError
from everstep.bus.ports import Bus
from everstep.bus.recorder import Recorder
from everstep.clock import Clock
from everstep.ids import checked_name, new_id
from everstep.messages import (
    ControlChanged,
    Done,
    ExcludeNode,
    Exclusion,
    IncludeNode,
    NodeExcluded,
    NodeIncluded,
    SetControl,
)
from everstep.subjects import CLUSTER
from everstep_services.health.nodes.control import (
    binds,
    switched,
    value_of,
    with_exclusion,
    without_exclusion,
)
from everstep_services.health.nodes.control_documents import Switches
from everstep_services.health.nodes.exclusions import close_breaker, pardon
from everstep_services.health.nodes.service import Registrar
from everstep_services.health.settings import NodeSettings

_HEALTH = "health"
_BREAKER = "breaker"
_LONGEST_S = 10 * 365 * 86400.0


class Deeds:
    """Each is done by compare-and-set, so that any replica may do it."""

    def __init__(
        self,
        settings: NodeSettings,
        bus: Bus,
        clock: Clock,
        records: Recorder,
        registrar: Registrar,
    ) -> None:
        self._settings = settings
        self._clock = clock
        self._records = records
        self._registrar = registrar
        self._switches = Switches(bus)

    async def exclude(self, ask: ExcludeNode) -> Done:
        """Let a node join nothing."""
        _check(ask)
        ttl_s = self._settings.exclude_ttl_s if ask.ttl_s is None else ask.ttl_s
        exclusion = Exclusion(node=ask.node, by=ask.by, reason=ask.reason, until=self._until(ttl_s))
        _, after, _ = await self._switches.change(
            CLUSTER, lambda document: with_exclusion(document, exclusion)
        )
        mode = "enforce" if binds(after) else "observe"
        self._records.keep(
            NodeExcluded(
                **self._about(ask), node=ask.node, by=ask.by, ttl_s=ttl_s or None, mode=mode
            )
        )
        long = f"for {ttl_s:g} s" if ttl_s else "until somebody includes it"
        if mode == "observe":
            return Done(text=f"{ask.node} is excluded {long}, but exclusions are only observed now")
        return Done(text=f"{ask.node} joins no round {long}; a round that it is in goes on")

    async def include(self, ask: IncludeNode) -> Done:
        """Let a node join again, and forget what spoke against it."""
        _check(ask)
        # First what health itself would keep it out for, else it would be put back.
        await self._registrar.change(lambda register, _: pardon(register, ask.node))
        before, after, _ = await self._switches.change(
            CLUSTER, lambda document: without_exclusion(document, ask.node)
        )
        if before == after:
            return Done(text=f"{ask.node} is not excluded; what spoke against it is forgotten")
        self._records.keep(NodeIncluded(**self._about(ask), node=ask.node, by=ask.by))
        return Done(text=f"{ask.node} may join again; what spoke against it is forgotten")

    async def switch(self, ask: SetControl) -> Done:
        """Change switches, or close the breaker."""
        changes = dict(ask.changes)
        closes = changes.pop(_BREAKER, None)
        if closes is not None and (closes, ask.job) != ("closed", CLUSTER):
            raise RefusalError(
                "422", f"breaker cannot be {closes!r} for {ask.job}: only 'closed', for {CLUSTER}"
            )
        before, after, revision = await self._switches.change(
            ask.job, lambda document: switched(document, changes, ask.by, ask.reason)
        )
        told: list[str] = []
        for name in changes:
            values = {"before": value_of(before, name), "after": value_of(after, name)}
            if values["before"] != values["after"]:
                told.append(name)
                self._changed(ask, name, **values, revision=revision)
        if closes:
            is_closed: bool = await self._registrar.change(
                lambda register, now: close_breaker(register, ask.by, ask.reason, now)
            )
            if is_closed:
                told.append(_BREAKER)
                self._changed(ask, _BREAKER, before="open", after="closed")
        return Done(text=f"changed: {', '.join(told)}" if told else "it stood so already")

    def _changed(self, ask: SetControl, name: str, **values: Any) -> None:
        about = self._about(ask)
        self._records.keep(
            ControlChanged(**about, name=name, by=ask.by, origin=ask.origin, **values)
        )

    def _about(self, ask: ExcludeNode | IncludeNode | SetControl) -> dict[str, Any]:
        return {
            "id": new_id(),
            "job": ask.job,
            "at": self._clock.wall(),
            "source": _HEALTH,
            "reason": ask.reason,
        }

    def _until(self, ttl_s: float) -> datetime | None:
        if not 0 <= ttl_s <= _LONGEST_S:
            text = f"a node cannot be excluded for {ttl_s:g} s: give seconds, or 0 for no end"
            raise RefusalError("422", text)
        return self._clock.wall() + timedelta(seconds=ttl_s) if ttl_s else None


def _check(ask: ExcludeNode | IncludeNode) -> None:
    if ask.job != CLUSTER:
        raise RefusalError("403", f"an exclusion holds for all jobs: ask about {CLUSTER}")
    if ask.by == _HEALTH:
        raise RefusalError("422", "health excludes nodes by itself: say who you are")
    checked_name("node", ask.node)
