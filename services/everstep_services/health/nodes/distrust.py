"""Checks that fail on so many nodes at once that they are to blame, and not the nodes."""

from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from everstep.messages import CheckResult, NodeRecord
from everstep_services.health.nodes.evidence import told


@dataclass(frozen=True, slots=True)
class NodeRules:
    """See `NodeSettings` for what each means."""

    strikes_limit: int
    strikes_window_s: float
    check_windows: int
    check_window_s: float
    distrust_ratio: float
    distrust_nodes: int
    exclude_ttl_s: float
    exclude_most: int
    breaker_ratio: float
    breaker_window_s: float


@dataclass(frozen=True, slots=True)
class Suspect:
    """A check of which one must think otherwise than before."""

    check: str
    failed: int
    ran: int
    is_everywhere: bool
    """It fails on too many to be believed; else it is to be believed again."""
    reason: str


def judged(
    records: Iterable[NodeRecord], distrusted: Collection[str], rules: NodeRules
) -> Iterator[Suspect]:
    """Each check of which one must think otherwise than before."""
    ran: Counter[str] = Counter()
    failed: Counter[str] = Counter()
    examples: dict[str, CheckResult] = {}
    for record in records:
        failing = {one.result.check: one.result for one in record.failing}
        ran.update({*record.checks, *failing})
        failed.update(failing.keys())
        examples.update(failing)
    for check in sorted({*failed, *distrusted}):
        failures, nodes = failed[check], ran[check]
        is_everywhere = failures >= max(rules.distrust_nodes, rules.distrust_ratio * nodes)
        if is_everywhere == (check in distrusted):
            continue
        said = f"{check} fails on {failures} of the {nodes} nodes on which it ran"
        limit = f"{rules.distrust_ratio:.0%} and {rules.distrust_nodes} nodes"
        why = f"{said}, below {limit}: it counts again"
        if is_everywhere:
            why = f"{said}; from {limit} on the check is to blame, and counts against nobody"
            why += f": {told([examples[check]])}"
        yield Suspect(check, failures, nodes, is_everywhere, why)
