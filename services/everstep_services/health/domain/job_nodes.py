"""The nodes of one job: which of them are silent, which to ask for a beat, which are lost.

Times that end in `_s` are of the observer's clock, which stands still while health is blind; times
that end in `_at`, and `now`, are of its monotonic clock.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from math import inf

from everstep.messages import NodeBeat
from everstep_services.health.domain.connection_probe import ConnectionProbe, is_alone
from everstep_services.health.domain.findings import NodeLoss, NodeReturn, loss_of, return_of
from everstep_services.health.domain.heard_node import HeardNode
from everstep_services.health.domain.round_progress import RoundProgress, done
from everstep_services.health.settings import HealthSettings

_BEAT_S = 1.05
"""The longest time between two beats of an agent that runs: one second, and some delay."""
_WITNESS_S = _BEAT_S
"""A node that was heard within this time may prove that the bus and the observer work."""
_HAILS_LEAST = 7
"""Lost messages do not explain the silence of a node that left this many hails unanswered."""
_ANSWERED_S = 0.1
"""How long a node needs at most to answer a hail."""
_QUICK_HAIL_S = 0.6
"""A node that was not heard since its round stopped is hailed after this silence."""
_QUICK_LIMIT_S = 1.2
_QUICKER_S = 0.55
"""The limit is shorter by this for a punctual node that alone leaves hails unanswered."""
_PUNCTUAL_S = 0.1
"""The beats of a punctual agent are late by this time at most."""
_ALONE_SHARE = 50
"""Where more than one in this many nodes leaves hails unanswered, the cause may not be in them."""
_WARDEN_ANSWERED_S = 0.3
"""How long the answer of a warden needs at most: it comes by another agent."""
_INQUIRE_EVERY_S = 0.4
_UNANSWERED = 3
"""Nodes that leave this many hails unanswered count as silent."""
_INQUIRIES_MOST = 64
_ASKED_MOST = 2
_ALIVE_FOR_S = 1.2
"""How long the answer of a warden counts: two inquiries, and the time that an answer takes."""
_HAS_LEFT = frozenset({"stopping", "joining"})
"""The states of an agent whose round is over."""
_STILL_LEAST_S = 0.5
_HAILS_IN_VAIN = 30
"""After this many hails, a node is hailed again only once it was heard or its training moved."""


@dataclass(frozen=True, slots=True)
class ObserverTime:
    """The time of a judgement, by both clocks of the observer."""

    seen_s: float
    """By the observer's clock."""
    now: float
    """By its monotonic clock."""
    read_at: float = inf
    """The observer has read every message that was sent to it before this time."""
    back_s: float = -inf
    """When the observer last ceased to be blind."""


class JobNodes:
    """The nodes of one job, and the progress of their round."""

    def __init__(self, settings: HealthSettings) -> None:
        self._settings = settings
        self._progress = RoundProgress(-1, -inf)
        self._is_alone = False
        """Few nodes leave hails unanswered."""
        self.nodes: dict[str, HeardNode] = {}
        """Those that are not lost, the longest silent first."""
        self.lost: dict[str, HeardNode] = {}

    def hear(
        self, beat: NodeBeat, seen_s: float, now: float, late_s: float = 0.0
    ) -> NodeReturn | None:
        """Take in a beat; return the finding that it makes, if the node was lost.

        `late_s`: the time for which it may have waited to be read.
        """
        if beat.state == "leaving":
            self.nodes.pop(beat.node, None)
            self.lost.pop(beat.node, None)
            return None
        node = self.nodes.get(beat.node)
        if node is None:
            return self._add(beat, seen_s, now, late_s)
        if beat.alive:
            self._note_alive(beat, seen_s)
        if node.is_over and beat.sequence <= node.beat.sequence:
            node.is_over = False  # a new agent: the job begins again
        self._note_progress(beat, node.hear(beat, seen_s, now), seen_s, late_s)
        del self.nodes[beat.node]
        self.nodes[beat.node] = node
        return None

    def hails(self, seen_s: float, now: float) -> Iterator[NodeBeat]:
        """The last beats of the nodes to hail now: nothing else explains their silence."""
        overdue_s, after_s = self._overdue_s(), self._settings.hail_after_s
        least_s = after_s if overdue_s == -inf else _QUICK_HAIL_S
        for node in self.nodes.values():
            if seen_s - node.seen_s < least_s:
                return
            is_quick = node.seen_s < overdue_s and self._is_of_round(node.beat)
            if node.is_over or not (is_quick or seen_s - node.seen_s >= after_s):
                continue
            # A node that a newer round left behind may be of that round: its beats may be lost.
            if not is_quick and self._moves(node.beat, seen_s, _STILL_LEAST_S):
                if node.hails:
                    node.hails = ()
            elif len(node.hails) < _HAILS_IN_VAIN and self._unheard_s(seen_s) < _WITNESS_S:
                node.hails += (now,)
                yield node.beat

    def inquiries(self, seen_s: float) -> Iterator[tuple[NodeBeat, list[NodeBeat]]]:
        """The nodes to ask whether the wardens of silent nodes live, each with those nodes."""
        silent = [
            node
            for node in self._unheard(seen_s)
            if node.is_at_work and seen_s - node.inquired_s >= _INQUIRE_EVERY_S
        ][:_INQUIRIES_MOST]
        if not silent:
            return
        for node in silent:
            node.inquired_s = seen_s
            node.first_inquired_s = min(node.first_inquired_s, seen_s)
        beats = [node.beat for node in silent]
        heard = (node.beat for node in reversed(self.nodes.values()))
        for beat in islice(heard, _ASKED_MOST):
            if seen_s - self.nodes[beat.node].seen_s >= _WITNESS_S:
                return
            yield beat, beats

    def probes(self, seen_s: float, back_s: float) -> Iterator[NodeBeat]:
        """The last beats of the nodes whose connection to probe now."""
        after_s = max(self._settings.hailed_limit_s, 2 * _BEAT_S)  # one beat may be lost
        for node in self.nodes.values():
            if seen_s - node.seen_s < after_s:
                return
            # While health was blind, the connection may have closed; the node may reconnect.
            if node.is_over or node.seen_s < back_s or self._is_left_behind(node.beat):
                continue
            if node.probe is None:
                node.probe = ConnectionProbe()
            if node.probe.is_due(seen_s):
                yield node.beat

    def probed(self, asked: NodeBeat, is_there: bool | None, seen_s: float) -> bool:
        """Note the result of a probe; return whether the node's connection is closed."""
        node = self.nodes.get(asked.node)
        if node is None or node.beat is not asked or node.probe is None:
            return False
        node.probe.note(is_there, seen_s)
        return is_there is False

    def disconnected_s(self, name: str) -> float | None:
        """When a node whose connection is closed was last heard; None for any other node."""
        node = self.nodes.get(name) or self.lost.get(name)
        if node is None or node.probe is None or not node.probe.refusals:
            return None
        return node.seen_s

    def end(self) -> None:
        """The job is over: its nodes are not lost when they fall silent."""
        for node in self.nodes.values():
            node.is_over = True
        self.lost.clear()

    def judge(self, at: ObserverTime, disconnected: Sequence[float] = ()) -> list[NodeLoss]:
        """The losses that are new.

        `disconnected`: when each node with a closed connection, of any job, was last heard; sorted.
        """
        losses: list[NodeLoss] = []
        least_s = self._settings.hail_after_s
        silent = self._silent(at.seen_s)
        if silent:
            unanswered = sum(len(node.hails) >= _UNANSWERED for node in self.nodes.values())
            self._is_alone = unanswered <= max(1, len(self.nodes) // _ALONE_SHARE)
        for node in silent:
            name = node.beat.node
            if node.is_over:
                del self.nodes[name]
                continue
            if node.probe is None and self._moves(node.beat, at.seen_s, least_s):
                continue  # as nearly all of them: their beats were lost
            is_replaced = self._is_left_behind(node.beat)
            loss = self._replaced_loss(node, at) if is_replaced else self._silence_loss(node, at)
            if loss is None and not is_replaced and is_alone(node.seen_s, disconnected):
                loss = self._connection_loss(node, at)
            if loss is not None:
                losses.append(loss)
        for loss in losses:
            node = self.nodes.pop(loss.beat.node)
            node.loss = loss
            self.lost[loss.beat.node] = node
        return losses

    def still_lost(self) -> Iterator[NodeLoss]:
        """The losses that are not over, but for nodes that a newer round has left behind."""
        for node in self.lost.values():
            if node.loss is not None and not self._is_left_behind(node.beat):
                yield node.loss

    def forget(self, before_s: float) -> None:
        """Drop the nodes that were last heard before that time."""
        for nodes in (self.nodes, self.lost):
            for name in [name for name, node in nodes.items() if node.seen_s < before_s]:
                del nodes[name]

    def _add(self, beat: NodeBeat, seen_s: float, now: float, late_s: float) -> NodeReturn | None:
        lost = self.lost.pop(beat.node, None)
        node = HeardNode(beat, seen_s, now, done(beat))
        if lost is not None:
            node.beat, node.done = lost.beat, lost.done
        self._note_progress(beat, node.hear(beat, seen_s, now), seen_s, late_s)
        self.nodes[beat.node] = node
        if lost is None or lost.loss is None:
            return None
        return return_of(lost.loss.id, lost.beat, beat, now - lost.heard_at)

    def _note_progress(self, beat: NodeBeat, age_s: float, seen_s: float, late_s: float) -> None:
        if beat.round is None or beat.slot is None:
            return
        progress = self._progress
        if beat.round != progress.round:
            # A lower number belongs to an old round, unless the newer one is silent: numbers
            # begin again when rendezvous has lost its documents.
            is_recent = seen_s - progress.heard_s < self._settings.all_silent_limit_s
            if beat.round < progress.round and is_recent:
                return
            progress = self._progress = RoundProgress(beat.round, seen_s)
        progress.heard_s = seen_s
        if age_s < inf:
            progress.advance(beat.node, seen_s - age_s, late_s)

    def _silent(self, seen_s: float) -> list[HeardNode]:
        silent: list[HeardNode] = []
        for node in self.nodes.values():
            if seen_s - node.seen_s < self._quick_limit_s:
                break
            silent.append(node)
        return silent

    def _is_left_behind(self, beat: NodeBeat) -> bool:
        """A newer round has formed without the node."""
        return (
            beat.slot is not None and beat.round is not None and beat.round < self._progress.round
        )

    def _silence_loss(self, node: HeardNode, at: ObserverTime) -> NodeLoss | None:
        """The loss of a node whose silence nothing explains."""
        settings, beat, seen_s = self._settings, node.beat, at.seen_s
        is_witnessed = self._is_witnessed(node, seen_s)
        has_moved = self._still_s(beat, seen_s) < inf
        # A hail counts once its answer would have been read: it may still wait in a queue.
        unanswered = sum(asked_at + _ANSWERED_S <= at.read_at for asked_at in node.hails)
        was_asked = unanswered >= _HAILS_LEAST
        if self._is_stopped(node, seen_s):
            return None
        is_short = has_moved and was_asked
        least_s = settings.hailed_limit_s if is_short else settings.silence_limit_s
        if is_short and self._is_quick(node, seen_s):
            least_s = self._quick_limit_s
        limit_s = least_s if is_witnessed else self._unwitnessed_limit_s(node)
        if node.seen_s < at.back_s:
            limit_s += settings.reconnect_grace_s
        still_s = settings.hail_after_s if is_short else least_s
        if seen_s - node.seen_s < limit_s or self._moves(beat, seen_s, still_s):
            return None
        evidence = "no node of its job is heard"
        if is_witnessed:
            evidence = f"{self._witness(seen_s)}{self._stillness(beat, seen_s)}"
        if node.hails:
            evidence = f"it was asked {len(node.hails)} times for a beat; {evidence}"
        return self._loss(node, at, limit_s, evidence)

    @property
    def _quick_limit_s(self) -> float:
        return max(_QUICK_LIMIT_S, self._settings.hailed_limit_s - _QUICKER_S)

    def _is_quick(self, node: HeardNode, seen_s: float) -> bool:
        """Whether the node's silence stands out: it was punctual, and it alone is silent.

        Its warden is silent, too, and no agent of its round stops or starts ranks.
        """
        beat = node.beat
        if not self._is_alone or beat.state != "running" or beat.late_s > _PUNCTUAL_S:
            return False
        if node.is_at_work and seen_s - node.first_inquired_s < _WARDEN_ANSWERED_S:
            return False
        return not self._is_round_over(node)

    def _unwitnessed_limit_s(self, node: HeardNode) -> float:
        """The limit while no node of the job is heard: nothing then tells what its ranks do."""
        is_open = node.probe is not None and node.probe.outlived
        settings = self._settings
        return settings.all_cut_off_limit_s if is_open else settings.all_silent_limit_s

    def _replaced_loss(self, node: HeardNode, at: ObserverTime) -> NodeLoss | None:
        """The loss of a node that rendezvous has found gone, and replaced, before health did.

        The last beat of an agent that leaves has the state `leaving`: this agent did not leave.
        """
        limit_s = self._settings.silence_limit_s
        if node.seen_s < at.back_s:
            limit_s += self._settings.reconnect_grace_s
        is_witnessed = self._is_witnessed(node, at.seen_s)
        if at.seen_s - node.seen_s < limit_s or not is_witnessed:
            return None
        evidence = f"round {self._progress.round} runs without it; {self._witness(at.seen_s)}"
        return replace(self._loss(node, at, limit_s, evidence), is_replaced=True)

    def _connection_loss(self, node: HeardNode, at: ObserverTime) -> NodeLoss | None:
        """The loss of a node whose connection closed: its agent is gone, even if others train."""
        settings, probe, seen_s = self._settings, node.probe, at.seen_s
        if probe is None or node.seen_s < at.back_s or not self._is_witnessed(node, seen_s):
            return None
        if not probe.is_closed(settings.reconnect_grace_s) or self._is_stopped(node, seen_s):
            return None
        evidence = (
            f"its connection to the bus closed after its last beat, and {probe.refusals} probes "
            f"over {probe.closed_s:.1f} s found no subscriber; {self._witness(seen_s)}"
        )
        limit_s = settings.hailed_limit_s + settings.reconnect_grace_s
        return self._loss(node, at, limit_s, evidence)

    def _unheard(self, seen_s: float) -> Iterator[HeardNode]:
        """The nodes that are silent, and whose training does not move."""
        overdue_s, after_s = self._overdue_s(), self._settings.hail_after_s
        least_s = after_s if overdue_s == -inf else _QUICK_HAIL_S
        for node in self.nodes.values():
            if seen_s - node.seen_s < least_s:
                return
            is_quick = len(node.hails) >= _UNANSWERED and node.seen_s < overdue_s
            is_silent = is_quick or seen_s - node.seen_s >= after_s
            if not is_silent or node.is_over or self._is_left_behind(node.beat):
                continue
            if is_quick or not self._moves(node.beat, seen_s, after_s):
                yield node

    def _note_alive(self, beat: NodeBeat, seen_s: float) -> None:
        """Note the wardens that answered the agent which sent this beat."""
        for name in beat.alive:
            node = self.nodes.get(name)
            if node is not None and name != beat.node:
                node.alive_s = seen_s

    def _is_stopped(self, node: HeardNode, seen_s: float) -> bool:
        """The node's warden lives: its agent is stopped or gets no turn, and the ranks run on.

        This holds for `stopped_limit_s`, and only while the round goes on: an agent that must stop
        or start ranks is needed at once.
        """
        is_alive = seen_s - node.alive_s < _ALIVE_FOR_S
        if not is_alive or seen_s - node.seen_s >= self._settings.stopped_limit_s:
            return False
        return node.is_at_work and not self._is_round_over(node)

    def _is_round_over(self, node: HeardNode) -> bool:
        return any(
            other.beat.round == node.beat.round and other.beat.state in _HAS_LEFT
            for other in self.nodes.values()
        )

    def _loss(self, node: HeardNode, at: ObserverTime, limit_s: float, evidence: str) -> NodeLoss:
        silence_s = at.seen_s - node.seen_s
        blind_s = max(0.0, at.now - node.heard_at - silence_s)
        loss = loss_of(
            node.beat, silence_s, limit_s, blind_s=blind_s, evidence=evidence,
            is_warden_alive=at.seen_s - node.alive_s < _ALIVE_FOR_S,
        )  # fmt: skip
        return replace(loss, last_step=node.last_step)

    def _is_witnessed(self, node: HeardNode, seen_s: float) -> bool:
        """The bus and the observer work: another node was heard, and after this one's next beat.

        Nodes that fell silent together never testify against each other.
        """
        newest_s = self._newest.seen_s
        return newest_s > node.seen_s + _BEAT_S and seen_s - newest_s < _WITNESS_S

    def _witness(self, seen_s: float) -> str:
        heard_s = max(0.0, self._unheard_s(seen_s))
        return f"{self._newest.beat.node} was heard {heard_s:.1f} s ago"

    @property
    def _newest(self) -> HeardNode:
        return self.nodes[next(reversed(self.nodes))]

    def _unheard_s(self, seen_s: float) -> float:
        """The seconds since any node was heard."""
        return seen_s - self._newest.seen_s

    def _still_s(self, beat: NodeBeat, seen_s: float) -> float:
        """The seconds since another node of its round made progress; infinite if none has."""
        if not self._is_of_round(beat):
            return inf
        return self._progress.still_s(beat.node, seen_s)

    def _moves(self, beat: NodeBeat, seen_s: float, least_s: float) -> bool:
        """The other nodes of its round make progress, which they could not do without it."""
        most_s = self._settings.moving_limit_most_s
        return self._is_of_round(beat) and self._progress.moves(beat.node, seen_s, least_s, most_s)

    def _overdue_s(self) -> float:
        """When the next progress of the round was due, if a later beat tells of none; or never."""
        overdue_s = self._progress.overdue_s(_STILL_LEAST_S, self._settings.moving_limit_most_s)
        return overdue_s if overdue_s <= self._progress.heard_s else -inf

    def _is_of_round(self, beat: NodeBeat) -> bool:
        return beat.slot is not None and beat.round == self._progress.round

    def _stillness(self, beat: NodeBeat, seen_s: float) -> str:
        if not self._is_of_round(beat):
            return ""
        still_s = self._still_s(beat, seen_s)
        if still_s == inf:
            return "; no other rank of its round shows progress"
        return f"; the other ranks of its round have not moved for {still_s:.1f} s"
