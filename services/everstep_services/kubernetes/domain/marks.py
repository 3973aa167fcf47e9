"""Which nodes get and lose a mark, and the change of a node's object that does it."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from everstep_services.kubernetes.domain.nodes import CORDONED, TAINT, ClusterNode
from everstep_services.kubernetes.settings import Marking

_LONGEST = 200


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
            note = {CORDONED: " ".join(reason.split())[:_LONGEST]}
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
