"""A node as the API server shows it: what its state means, and the marks that we set and remove."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from everstep.ids import name_of_host
from everstep_services.kubernetes.settings import KubernetesSettings, Marking, Reaction

TAINT = "everstep.io/excluded"
"""The key of our taint."""
CORDONED = "everstep.io/cordoned"
"""The annotation of a node that we have cordoned."""
_NOTE_MOST = 200
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


@dataclass(frozen=True, slots=True)
class Marks:
    """The nodes to mark and to unmark, by their names in the cluster."""

    add: tuple[str, ...] = ()
    remove: tuple[str, ...] = ()
    held_back: tuple[str, ...] = ()
    """Nodes that stay unmarked because too many are marked."""


def marks(nodes: Iterable[ClusterNode], excluded: Collection[str], most: int) -> Marks:
    """Compare the marks of nodes with the exclusions, given by their ids in Everstep."""
    ordered = sorted(nodes, key=lambda node: node.name)
    wanted = [node.name for node in ordered if node.id in excluded and not node.is_marked]
    remove = tuple(node.name for node in ordered if node.is_marked and node.id not in excluded)
    stay = sum(node.is_marked and node.id in excluded for node in ordered)
    room = max(0, most - stay)
    return Marks(tuple(wanted[:room]), remove, tuple(wanted[room:]))


def ambiguous(nodes: Iterable[ClusterNode]) -> dict[str, tuple[str, ...]]:
    """The names of nodes that have the same id in Everstep, by that id."""
    by_id: dict[str, list[str]] = {}
    for node in nodes:
        by_id.setdefault(node.id, []).append(node.name)
    return {id: tuple(sorted(names)) for id, names in by_id.items() if len(names) > 1}


def marked(node: ClusterNode, marking: Marking, reason: str) -> Mapping[str, Any]:
    """The merge patch that marks a node. It holds for this version of the node only."""
    match marking:
        case "observe":
            return {}
        case "taint":
            taint = {"key": TAINT, "effect": "NoSchedule"}
            return _patch(node, spec={"taints": [*msgspec.to_builtins(node.taints), taint]})
        case "cordon":
            note = {CORDONED: " ".join(reason.split())[:_NOTE_MOST]}
            return _patch(node, spec={"unschedulable": True}, annotations=note)


def unmarked(node: ClusterNode) -> Mapping[str, Any]:
    """The merge patch that removes our marks, and nothing else."""
    spec: dict[str, Any] = {}
    if node.is_tainted_by_us:
        kept = [taint for taint in node.taints if taint.key != TAINT]
        spec["taints"] = msgspec.to_builtins(kept)
    if node.is_cordoned_by_us:
        spec["unschedulable"] = False
    return _patch(node, spec=spec, annotations={CORDONED: None})


def _patch(
    node: ClusterNode,
    *,
    spec: Mapping[str, Any],
    annotations: Mapping[str, str | None] | None = None,
) -> Mapping[str, Any]:
    metadata: dict[str, Any] = {"resourceVersion": node.metadata.resourceVersion}
    if annotations:
        metadata["annotations"] = annotations
    return {"metadata": metadata, "spec": spec} if spec else {"metadata": metadata}
