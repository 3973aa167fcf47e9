"""A register of nodes, facts about them, and a wall clock that the test moves."""

import itertools
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from everstep.messages import (
    ActionDecided,
    CheckResult,
    Fact,
    IncidentClosed,
    Ledger,
    NodeCheckFinished,
    NodeExcluded,
    NodeLost,
    NodeReturned,
    NodesDocument,
    StragglerFound,
    VerdictReached,
)
from everstep.messages.facts.stamp import FactStamp
from everstep_services.health.nodes.exclusions import ExclusionScope, decide
from everstep_services.health.nodes.register import NodeRegister
from everstep_services.health.settings import NodeSettings

SETTINGS = NodeSettings()


def failed(
    check: str, failure_class: str = "replace", *, subject: str = "", reason: str = ""
) -> CheckResult:
    return CheckResult(
        check=check, state="failed", failure_class=failure_class, subject=subject, reason=reason
    )


class Nodes:
    """What the facts of a test come to."""

    def __init__(
        self, settings: NodeSettings = SETTINGS, *, nodes: int = 100, enforces: bool = True
    ) -> None:
        self.settings = settings
        self.scope = ExclusionScope(nodes, enforces)
        self.wall = datetime(2026, 3, 1, tzinfo=UTC)
        self.register = NodeRegister(NodesDocument(), settings)
        self.said: list[Fact] = []
        self._ids = itertools.count(1)

    def new_id(self) -> str:
        return f"{next(self._ids):032d}"

    @property
    def moment(self) -> FactStamp:
        return FactStamp(self.wall, self.new_id, "health")

    def wait(self, seconds: float) -> None:
        self.wall += timedelta(seconds=seconds)

    def take(self, fact: Fact) -> Fact:
        self.register.apply(fact, self.moment)
        return fact

    def judge(self) -> list[Fact]:
        """The decisions now; the register goes through its document, as after a restart."""
        self.register.judge(self.moment)
        decide(self.register, self.scope, self.moment)
        new = self.register.facts
        self.said += new
        self.register = NodeRegister(self.register.document("s", 1, ()), self.settings)
        return new

    def names(self, facts: Sequence[Fact]) -> list[str]:
        return [type(fact).__name__ for fact in facts]

    def about(self, **more: Any) -> dict[str, Any]:
        return {"id": self.new_id(), "job": "j", "at": self.wall, "source": "test", **more}

    def examined(
        self, node: str, *results: CheckResult, checks: tuple[str, ...] = ("gpu", "nic")
    ) -> Fact:
        is_healthy = all(one.state != "failed" for one in results)
        return self.take(
            NodeCheckFinished(
                **self.about(),
                node=node,
                occasion="periodic",
                is_healthy=is_healthy,
                took_s=1.0,
                results=results,
                checks=checks,
            )
        )

    def confirmed(
        self, *nodes: str, check: str = "nic", rule: str = "checks.exclude", mode: str = "enforce"
    ) -> Fact:
        """Rendezvous has nodes leave whose probe fails, and passes elsewhere."""
        return self.take(
            ActionDecided(
                **self.about(),
                action="exclude",
                reason=f"{check} fails on 1 of 3 nodes, and passes on 2",
                rule=rule,
                mode=mode,
                evidence=("f" * 32,),
                nodes_out=nodes,
                check=check,
            )
        )

    def probed(
        self, node: str, check: str = "nic", *, state: str = "failed", failure_class: str = ""
    ) -> Fact:
        result = CheckResult(check=check, state=state, failure_class=failure_class)
        return self.take(
            NodeCheckFinished(
                **self.about(),
                node=node,
                occasion="probe",
                is_healthy=state != "failed",
                took_s=0.1,
                results=(result,),
                checks=(check,),
                policy="exclude",
            )
        )

    def lost(self, node: str, **more: Any) -> Fact:
        return self.take(
            NodeLost(**self.about(node=node, silence_s=3.0, limit_s=3.0, reason="silent", **more))
        )

    def returned(self, loss: Fact, node: str, how: str) -> Fact:
        about = self.about(node=node, away_s=9.0, loss=loss.id, how=how, lost_round=loss.round)
        return self.take(NodeReturned(**about))

    def verdict(
        self,
        incident: str,
        *nodes: str,
        cause: str = "gpu",
        revision: int = 0,
        round: int | None = None,
        **more: Any,
    ) -> Fact:
        return self.take(
            VerdictReached(
                **self.about(incident=incident, round=round),
                cause=cause,
                confidence=0.9,
                reason="XID 79",
                culprit_nodes=nodes,
                revision=revision,
                **more,
            )
        )

    def closed(self, incident: str, **more: Any) -> Fact:
        return self.take(
            IncidentClosed(
                **self.about(incident=incident),
                **{"outcome": "recovered", "reason": "back", "ledger": Ledger(), **more},
            )
        )

    def slow(
        self, node: str, *, job: str = "j", cause: str = "host", confidence: float | None = None
    ) -> Fact:
        return self.take(
            StragglerFound(
                **{**self.about(), "job": job},
                round=1,
                node=node,
                slot=0,
                rank=3,
                cause=cause,
                reason="20 % above the median",
                confidence=confidence,
            )
        )

    def strikes(self, node: str) -> int:
        return len(self.register.strikes(self.register.record(node)))

    def fail_for_long(
        self, *nodes: str, check: str = "gpu", failure_class: str = "replace"
    ) -> None:
        """In two windows, with another node on which the check passes for each of them."""
        for _ in range(2):
            for node in nodes:
                self.examined(node, failed(check, failure_class))
                self.examined(f"{node}-well-1")
                self.examined(f"{node}-well-2")
            self.wait(self.settings.check_window_s)

    @property
    def excluded(self) -> list[str]:
        return [fact.node for fact in self.said if isinstance(fact, NodeExcluded)]
