"""A node as the API server shows it, and what its taints, conditions and cordon mean."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import msgspec

from everstep.ids import name_of_host
from everstep_services.kubernetes.settings import KubernetesSettings, Reaction

TAINT = "everstep.io/excluded"
"""The key of our taint."""
CORDONED = "everstep.io/cordoned"
"""The annotation of a node that we have cordoned."""
_NOT_OURS = frozenset({TAINT, "node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"})
"""Taints that do not count. Health itself judges whether a silent node is lost: an API server that
does not reach a node does not know whether it trains."""
SignKind = Literal["none", "cordoned", "departing", "condition"]


class Taint(msgspec.Struct, frozen=True, omit_defaults=True):
    """A taint of a node."""

    key: str
    effect: str = ""
    value: str = ""
    timeAdded: str | None = None  # noqa: N815  the API server's name


class _Metadata(msgspec.Struct, frozen=True):
    name: str = ""
    resourceVersion: str = ""  # noqa: N815
    annotations: Mapping[str, str] | None = None


class _Spec(msgspec.Struct, frozen=True):
    unschedulable: bool = False
    taints: tuple[Taint, ...] | None = None


class _Condition(msgspec.Struct, frozen=True):
    type: str
    status: str
    reason: str = ""


class _Status(msgspec.Struct, frozen=True):
    conditions: tuple[_Condition, ...] | None = None


class ClusterNode(msgspec.Struct, frozen=True):
    """What is used of a node; the API server's other fields are ignored."""

    metadata: _Metadata
    spec: _Spec = _Spec()
    status: _Status = _Status()

    @property
    def name(self) -> str:
        """Its name in the cluster."""
        return self.metadata.name

    @property
    def id(self) -> str:
        """Its id in Everstep; agents in its pods use the same."""
        return name_of_host(self.metadata.name)

    @property
    def taints(self) -> tuple[Taint, ...]:
        """Its taints."""
        return self.spec.taints or ()

    @property
    def is_tainted_by_us(self) -> bool:
        """Whether it has our taint."""
        return any(taint.key == TAINT for taint in self.taints)

    @property
    def is_cordoned_by_us(self) -> bool:
        """Whether it is cordoned, and we did it."""
        return self.spec.unschedulable and CORDONED in (self.metadata.annotations or {})

    @property
    def is_marked(self) -> bool:
        """Whether it has a mark of ours."""
        return self.is_tainted_by_us or CORDONED in (self.metadata.annotations or {})


@dataclass(frozen=True, slots=True)
class ClusterSign:
    """The worst that a node shows, and the words for people."""

    kind: SignKind = "none"
    reason: str = ""


def sign_of(node: ClusterNode, settings: KubernetesSettings) -> ClusterSign:
    """What a node shows; our own marks do not count, or an exclusion would never end."""
    for taint in node.taints:
        if taint.key in _NOT_OURS:
            continue
        if taint.key in settings.departure_taints or taint.effect == "NoExecute":
            return ClusterSign("departing", f"Kubernetes takes {node.name} away: taint {taint.key}")
    for condition in node.status.conditions or ():
        if condition.type in settings.conditions and condition.status == "True":
            why = f" ({condition.reason})" if condition.reason else ""
            return ClusterSign(
                "condition", f"Kubernetes reports {condition.type}{why} on {node.name}"
            )
    if node.spec.unschedulable and not node.is_cordoned_by_us:
        return ClusterSign("cordoned", f"{node.name} is cordoned in Kubernetes")
    return ClusterSign()


def reaction_to(sign: ClusterSign, settings: KubernetesSettings) -> Reaction:
    """What a sign causes."""
    match sign.kind:
        case "none":
            return "ignore"
        case "cordoned":
            return settings.on_cordon
        case "departing":
            return settings.on_departure
        case "condition":
            return settings.on_condition
