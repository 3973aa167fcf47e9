"""Judges the network test for which a round waits: who leaves, who is doubted, what people read."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from everstep.messages.documents.rounds import OpenNetworkTest
from everstep.messages.facts.health import NetworkLink
from everstep.node_pairs import MeasuredPair, SlowNodes, slow_ones
from everstep_services.rendezvous.domain.batch import Batch
from everstep_services.rendezvous.domain.decisions import came_of, decide_to, only_say
from everstep_services.rendezvous.domain.formation import candidate_of, may_have_slot, world_of
from everstep_services.rendezvous.domain.network import pair_test
from everstep_services.rendezvous.domain.placement import largest_size

_NAMED_MOST = 8
_FACTS_MOST = 64
SLOW = "network.slow"
"""The rule by which a node leaves that reaches none of its partners as others reach theirs."""
NO_PLACE = "network.no_place"
"""The rule by which such a node stays: only it could have the slot."""


def settle(batch: Batch) -> bool:
    """Return whether the next round still waits for its test; judge the test once it is over.

    It is over when each node has told its figures, or its time is over. Without one of its nodes it
    means nothing: the others begin again.
    """
    test = pair_test.open_test(batch)
    if test is None or test.is_over or batch.state.doc.phase != "joining":
        return False
    here = {seat.node for seat in batch.state.in_stage("idle")}
    nodes = {peer.node for peer in test.order.peers}
    if not nodes <= here:
        batch.state.set(network=None)
        batch.timers.clear("network_test")
        return False
    pair_test.send(batch, test)
    silent = sorted(nodes - {figures.node for figures in test.figures})
    took_s = batch.timers.elapsed("network_test", test.order.id)
    if silent and took_s < batch.settings.network_test_within_s:
        return True
    _judge(batch, test, silent, took_s)
    return False


def _judge(batch: Batch, test: OpenNetworkTest, silent: Sequence[str], took_s: float) -> None:
    links = _links(test)
    slow = slow_ones(MeasuredPair((node, link.node), link.speed_mib_s) for node, link in links)
    texts = {finding.nodes: _about(finding, links) for finding in slow}
    accused = {nodes[0]: text for nodes, text in texts.items() if len(nodes) == 1}
    leaving = _send_away(batch, test, accused)
    unmeasured = [*silent, *(figures.node for figures in test.figures if figures.reason)]
    doubtful = {*unmeasured, *(node for nodes in texts for node in nodes)} - leaving
    batch.state.set(network=replace(test, is_over=True, doubted=tuple(sorted(doubtful))))
    batch.timers.clear("network_test")
    count = len(test.figures)
    lines = [
        f"has tested the network before round {test.round} in {took_s:.1f} s: {count} "
        f"{'node has' if count == 1 else 'nodes have'} answered{_range(links)}"
    ]
    for nodes, text in list(texts.items())[:_NAMED_MOST]:
        leaves = leaving.issuperset(nodes)
        lines.append(f"{text}: {'it leaves the job' if leaves else 'other nodes get slots first'}")
    if unmeasured:
        names = ", ".join(unmeasured[:_NAMED_MOST])
        lines.append(f"{names} could not be measured, and gets a slot only if no other node can")
    batch.say_waiting(f"network.over {test.order.id}", "; ".join(lines))


def _links(test: OpenNetworkTest) -> list[tuple[str, NetworkLink]]:
    """The measured links, without those to nodes about which nothing is known."""
    clear = {figures.node for figures in test.figures if not figures.reason}
    return [
        (figures.node, link)
        for figures in test.figures
        for link in figures.links
        if link.speed_mib_s or {figures.node, link.node} <= clear
    ]


def _send_away(batch: Batch, test: OpenNetworkTest, accused: Mapping[str, str]) -> set[str]:
    """Let slow nodes leave the job if the others can form a round, and return who leaves."""
    if not accused:
        return set()
    others = [
        candidate_of(seat)
        for seat in batch.state.in_stage("idle")
        if seat.node not in accused and may_have_slot(batch, seat)
    ]
    reason = "; ".join(list(accused.values())[:_NAMED_MOST])
    facts = tuple(
        figures.fact
        for figures in test.figures
        if figures.node in accused or any(link.node in accused for link in figures.links)
    )[:_FACTS_MOST]
    if not batch.control.enforces("exclude", otherwise=True):
        rule, why = "exclude.observe", "exclusions only observe"
    elif not largest_size(others, world_of(batch)):
        rule, why = NO_PLACE, "no other node can have its slot"
    else:
        for node, text in accused.items():
            seat = batch.state.seat(node)
            if seat is not None:
                batch.state.send_away(seat, text)
        names = tuple(accused)
        decide_to(batch, "exclude", reason, rule=SLOW, evidence=facts, nodes_out=names)
        came_of(batch, "done", f"{', '.join(names)} leaves the job", "exclude")
        return set(accused)
    only_say(batch, "exclude", f"{reason}; {why}", rule=rule, evidence=facts)
    return set()


def _range(links: Sequence[tuple[str, NetworkLink]]) -> str:
    speeds = [link.speed_mib_s for _, link in links if link.speed_mib_s]
    if not speeds:
        why = next((f": {link.reason}" for _, link in links if link.reason), "")
        return f", and no pair could be measured{why}"
    over = sorted({link.backend for _, link in links if link.backend})
    return f", {min(speeds):.0f} to {max(speeds):.0f} MiB/s over {' and '.join(over) or 'TCP'}"


def _about(finding: SlowNodes, links: Sequence[tuple[str, NetworkLink]]) -> str:
    """Return what the test found out about a node or link, and why."""
    is_of = set(finding.nodes)
    whys = (link.reason for node, link in links if is_of <= {node, link.node} and link.reason)
    return finding.reason + next((f" ({why})" for why in whys), "")
