"""The nodes of one job: who of them is silent, who is to be asked, who is lost."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

from everstep.messages import NodeBeat
from everstep_services.health.domain.connection_probe import Door, is_alone
from everstep_services.health.domain.findings import Lost, Returned, lost, returned
from everstep_services.health.domain.progress import Motion, progress_age_s

_BEAT_S = 1.05
"""Between two beats of an agent, and what they may be late by."""
_HAILS_LEAST = 7
"""Who was asked so often, and would have been heard, is not silent because beats were lost."""
_ANSWERED_S = 0.1
"""A node that is asked for a beat has sent it by then."""
_INQUIRE_EVERY_S = 0.4
_INQUIRIES_MOST = 64
_ASKED_MOST = 2
_ALIVE_FOR_S = 1.2
"""What a warden has answered holds so long: for two inquiries, and what an answer takes."""
_AT_WORK = frozenset({"starting", "running"})
_HAS_LEFT = frozenset({"stopping", "joining"})
"""What a node says of itself whose round is over."""
_HAILS_IN_VAIN = 30
"""Who was asked so often is not asked again before it is heard, or its training has moved."""


@dataclass(frozen=True, slots=True)
class Limits:
    """See `HealthSettings` for what each means."""

    silence_s: float
    hail_after_s: float
    hailed_s: float
    all_silent_s: float
    stopped_s: float
    reconnect_s: float
    moving_most_s: float
    tick_s: float
    pause_s: float
    forget_s: float

    @property
    def witness_s(self) -> float:
        """Whoever was heard within this proves that the bus and the observer work.

        Less than the limit by more than the time between two beats, so that nodes which fell
        silent together never bear witness against each other.
        """
        return self.hailed_s - _BEAT_S


@dataclass(frozen=True, slots=True)
class Moment:
    """When nodes are judged."""

    seen_s: float
    """By the sighted clock."""
    now: float
    """By the observer's own."""
    read_at: float = inf
    """All that was sent to the observer until then has been heard; by its own clock, too."""
    back_s: float = -inf
    """When it last ceased to be blind, by the sighted clock."""


@dataclass(slots=True)
class _Node:
    beat: NodeBeat
    seen_s: float
    """By the sighted clock."""
    heard_at: float
    """By the observer's own."""
    is_over: bool = False
    """Its job has ended: nobody waits for it."""
    hails: tuple[float, ...] = ()
    """When it was asked for a beat since it was heard, by the observer's own clock."""
    door: Door | None = None
    """Whether anybody hears what is said to it; nobody has asked since it was heard."""
    inquired_s: float = -inf
    """When others were last asked to find out whether its warden lives, by the sighted clock."""
    alive_s: float = -inf
    """When its warden was last known to, by the sighted clock."""
    loss: Lost | None = None
    """What was found, once it is lost."""


def _is_at_work(beat: NodeBeat) -> bool:
    """Its ranks run, or are about to, and others may ask its warden whether it lives."""
    return beat.warden is not None and beat.slot is not None and beat.state in _AT_WORK


class Company:
    """The nodes of one job, and whether their training moves."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._motion = Motion(-1, -inf)
        self.nodes: OrderedDict[str, _Node] = OrderedDict()
        """The longest silent first."""
        self.lost: dict[str, _Node] = {}

    def hear(self, beat: NodeBeat, seen_s: float, now: float) -> Returned | None:
        """A sign of life."""
        if beat.state == "leaving":
            self.nodes.pop(beat.node, None)
            self.lost.pop(beat.node, None)
            return None
        node = self.nodes.get(beat.node)
        if node is None:
            return self._welcome(beat, seen_s, now)
        self._note_motion(beat, node.beat, seen_s)
        self._note_alive(beat, seen_s)
        if node.is_over and beat.sequence <= node.beat.sequence:
            node.is_over = False  # another agent: the job begins again
        node.beat, node.seen_s, node.heard_at, node.hails, node.door = beat, seen_s, now, (), None
        self.nodes.move_to_end(beat.node)
        return None

    def hails(self, seen_s: float, now: float) -> Iterator[NodeBeat]:
        """Those to be asked for a beat now: nothing else will soon speak for them."""
        limits = self._limits
        for node in self.nodes.values():
            if seen_s - node.seen_s < limits.hail_after_s:
                return
            if node.is_over or self._is_left_behind(node.beat):
                continue
            if self._moves(node.beat, seen_s, limits.hail_after_s):
                node.hails = ()
            elif len(node.hails) < _HAILS_IN_VAIN and self._unheard_s(seen_s) < limits.witness_s:
                node.hails += (now,)
                yield node.beat

    def inquiries(self, seen_s: float) -> Iterator[tuple[NodeBeat, list[NodeBeat]]]:
        """Who is to find out whether the wardens of silent nodes live, and of which."""
        silent = [
            node
            for node in self._unheard(seen_s)
            if _is_at_work(node.beat) and seen_s - node.inquired_s >= _INQUIRE_EVERY_S
        ][:_INQUIRIES_MOST]
        if not silent:
            return
        for node in silent:
            node.inquired_s = seen_s
        beats = [node.beat for node in silent]
        heard = (one.beat for one in reversed(self.nodes.values()))
        for beat in islice(heard, _ASKED_MOST):
            if seen_s - self.nodes[beat.node].seen_s >= self._limits.witness_s:
                return
            yield beat, beats

    def knocks(self, seen_s: float, back_s: float) -> Iterator[NodeBeat]:
        """Those whose connection may have closed with their last word: ask who hears them."""
        after_s = max(self._limits.hailed_s, 2 * _BEAT_S)  # a single beat that is lost is no news
        for node in self.nodes.values():
            if seen_s - node.seen_s < after_s:
                return
            # While we were blind ourselves, it may have closed and be on its way back.
            if node.is_over or node.seen_s < back_s or self._is_left_behind(node.beat):
                continue
            if node.door is None:
                node.door = Door()
            if node.door.is_due(seen_s):
                yield node.beat

    def knocked(self, asked: NodeBeat, is_there: bool | None, seen_s: float) -> bool:
        """Nobody hears it, and it was not heard since it was asked for."""
        node = self.nodes.get(asked.node)
        if node is None or node.beat is not asked or node.door is None:
            return False
        node.door.answered(is_there, seen_s)
        return is_there is False

    def last_word_s(self, name: str) -> float | None:
        """When a node fell silent where nobody listens; None when that is not so."""
        node = self.nodes.get(name) or self.lost.get(name)
        if node is None or node.door is None or not node.door.refusals:
            return None
        return node.seen_s

    def end(self) -> None:
        """The job is over: that its nodes fall silent will be no news."""
        for node in self.nodes.values():
            node.is_over = True
        self.lost.clear()

    def judge(self, at: Moment, shut: Sequence[float] = ()) -> list[Lost]:
        """Each node whose loss is new.

        `shut`: when all nodes that nobody hears any more, of all jobs, fell silent; in order.
        """
        found: list[Lost] = []
        for node in self._silent(at.seen_s):
            name = node.beat.node
            if node.is_over or self._is_left_behind(node.beat):
                del self.nodes[name]
                continue
            finding = self._judged(node, at)
            if finding is None and is_alone(node.seen_s, shut):
                finding = self._shut_out(node, at)
            if finding is not None:
                found.append(finding)
        for finding in found:
            node = self.nodes.pop(finding.beat.node)
            node.loss = finding
            self.lost[finding.beat.node] = node
        return found

    def still_lost(self) -> Iterator[Lost]:
        """The findings that are not over, unless the job has gone on without the node."""
        for node in self.lost.values():
            if node.loss is not None and not self._is_left_behind(node.beat):
                yield node.loss

    def forget(self, before_s: float) -> None:
        """Drop every node that was last heard before that."""
        for known in (self.nodes, self.lost):
            for name in [name for name, node in known.items() if node.seen_s < before_s]:
                del known[name]

    def _welcome(self, beat: NodeBeat, seen_s: float, now: float) -> Returned | None:
        gone = self.lost.pop(beat.node, None)
        self._note_motion(beat, None if gone is None else gone.beat, seen_s)
        self.nodes[beat.node] = _Node(beat, seen_s, now)
        if gone is None or gone.loss is None:
            return None
        return returned(gone.loss.id, gone.beat, beat, now - gone.heard_at)

    def _note_motion(self, beat: NodeBeat, before: NodeBeat | None, seen_s: float) -> None:
        if beat.round is None or beat.slot is None:
            return
        motion = self._motion
        if beat.round != motion.round:
            # A lower number is an old round's, unless nobody is left in the newer one: rounds
            # begin again when rendezvous has lost all it knew.
            if beat.round < motion.round and seen_s - motion.heard_s < self._limits.all_silent_s:
                return
            motion = self._motion = Motion(beat.round, seen_s)
        motion.heard_s = seen_s
        age_s = progress_age_s(beat, before)
        if age_s is not None:
            motion.advance(beat.node, seen_s - age_s)

    def _silent(self, seen_s: float) -> list[_Node]:
        silent: list[_Node] = []
        for node in self.nodes.values():
            if seen_s - node.seen_s < self._limits.hailed_s:
                break
            silent.append(node)
        return silent

    def _is_left_behind(self, beat: NodeBeat) -> bool:
        """A newer round has formed without it."""
        return beat.slot is not None and beat.round is not None and beat.round < self._motion.round

    def _judged(self, node: _Node, at: Moment) -> Lost | None:
        limits, beat, seen_s = self._limits, node.beat, at.seen_s
        unheard_s = self._unheard_s(seen_s)
        is_witnessed = unheard_s < limits.witness_s
        has_moved = self._still_s(beat, seen_s) < inf
        # A question counts once its answer would have been heard: it may still wait to be read.
        in_vain = sum(asked_at + _ANSWERED_S <= at.read_at for asked_at in node.hails)
        was_asked = in_vain >= _HAILS_LEAST
        if self._is_stopped(node, seen_s):
            return None
        least_s = limits.hailed_s if has_moved and was_asked else limits.silence_s
        limit_s = least_s if is_witnessed else limits.all_silent_s
        if node.seen_s < at.back_s:
            limit_s += limits.reconnect_s
        if seen_s - node.seen_s < limit_s or self._moves(beat, seen_s, least_s):
            return None
        others = "nobody of its job is heard"
        if is_witnessed:
            others = self._witness(seen_s)
        if node.hails:
            others = f"it was asked {len(node.hails)} times for a beat; {others}"
        others += self._stillness(beat, seen_s)
        return self._found(node, at, limit_s, others)

    def _shut_out(self, node: _Node, at: Moment) -> Lost | None:
        """Its agent is gone, as its connection is: others may train on, but not with it."""
        limits, door, seen_s = self._limits, node.door, at.seen_s
        if door is None or node.seen_s < at.back_s or self._unheard_s(seen_s) >= limits.witness_s:
            return None
        if not door.is_shut(limits.reconnect_s) or self._is_stopped(node, seen_s):
            return None
        others = (
            f"its connection to the bus closed with its last word, and for {door.shut_s:.1f} s "
            f"nobody has heard what it was asked ({door.refusals} times); {self._witness(seen_s)}"
        )
        return self._found(node, at, limits.hailed_s + limits.reconnect_s, others)

    def _unheard(self, seen_s: float) -> Iterator[_Node]:
        """Nodes that are silent for so long that they are asked, unless the others train on."""
        for node in self.nodes.values():
            if seen_s - node.seen_s < self._limits.hail_after_s:
                return
            if node.is_over or self._is_left_behind(node.beat):
                continue
            if not self._moves(node.beat, seen_s, self._limits.hail_after_s):
                yield node

    def _note_alive(self, beat: NodeBeat, seen_s: float) -> None:
        """Others have asked the wardens of silent nodes."""
        for name in beat.alive:
            node = self.nodes.get(name)
            if node is not None and name != beat.node:
                node.alive_s = seen_s

    def _is_stopped(self, node: _Node, seen_s: float) -> bool:
        """Its warden lives: the agent is there, and gets no turn; its ranks need none.

        That is believed for a time, and only while its round goes on: who is to stop its ranks, or
        to start others, is needed at once.
        """
        is_alive = seen_s - node.alive_s < _ALIVE_FOR_S
        if not is_alive or seen_s - node.seen_s >= self._limits.stopped_s:
            return False
        is_over = any(
            other.beat.round == node.beat.round and other.beat.state in _HAS_LEFT
            for other in self.nodes.values()
        )
        return _is_at_work(node.beat) and not is_over

    def _found(self, node: _Node, at: Moment, limit_s: float, others: str) -> Lost:
        silence_s = at.seen_s - node.seen_s
        blind_s = max(0.0, at.now - node.heard_at - silence_s)
        if at.seen_s - node.alive_s < _ALIVE_FOR_S:
            others += "; its warden answers: its agent is stopped, and was waited for"
        return lost(node.beat, silence_s, limit_s, blind_s=blind_s, others=others)

    def _witness(self, seen_s: float) -> str:
        heard_s = max(0.0, self._unheard_s(seen_s))
        return f"{self._newest.beat.node} was heard {heard_s:.1f} s ago"

    @property
    def _newest(self) -> _Node:
        return self.nodes[next(reversed(self.nodes))]

    def _unheard_s(self, seen_s: float) -> float:
        """Since any node was heard."""
        return seen_s - self._newest.seen_s

    def _still_s(self, beat: NodeBeat, seen_s: float) -> float:
        """Since the other nodes of its round made progress; infinite if they were not seen to."""
        if beat.slot is None or beat.round != self._motion.round:
            return inf
        return self._motion.still_s(beat.node, seen_s)

    def _moves(self, beat: NodeBeat, seen_s: float, least_s: float) -> bool:
        """The other nodes of its round train on. They could not, if it did not."""
        limit_s = self._motion.proves_for_s(least_s, self._limits.moving_most_s)
        return self._still_s(beat, seen_s) < limit_s

    def _stillness(self, beat: NodeBeat, seen_s: float) -> str:
        if beat.slot is None or beat.round != self._motion.round:
            return ""
        still_s = self._still_s(beat, seen_s)
        if still_s == inf:
            return "; no other rank of its round shows progress"
        return f"; the other ranks of its round have not moved for {still_s:.1f} s"
