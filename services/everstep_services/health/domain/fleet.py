"""Which nodes are lost: silence that neither our own blindness nor moving training explains.

Moving training explains silence. It explains no connection that closed, and stays closed.
"""

import itertools
from math import inf

from everstep.messages import NodeBeat
from everstep_services.health.domain.findings import Lost, Returned
from everstep_services.health.domain.job_nodes import Company, Limits, Moment
from everstep_services.health.sight import SightedClock

_FORGET_EVERY_S = 60.0
_HAILS_MOST = 256
"""At once: where more are silent, it is not they who are to blame."""
_REMINDERS_MOST = 1024
_HURRY = 4
"""So many ticks in the time of one while we are late: so that we judge as soon as we have read."""


class Fleet:
    """The nodes of all jobs. The same calls give the same findings, on any machine.

    `hear` for each beat, `judge` every `tick_s` of ours; both take the observer's monotonic clock.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._companies: dict[str, Company] = {}
        self._sight = SightedClock(limits.pause_s)
        self._was_blind = self._is_late = False
        self._shut: set[tuple[str, str]] = set()
        """Job and node of those that nobody heard when they were asked for."""
        self._ticked_at = inf
        self._woke_at = -inf
        self.is_behind = False
        """When all were judged last, what had been sent to us waited for too long to be read."""
        self._back_s = -inf
        self._forgot_s = -inf

    @property
    def tick_s(self) -> float:
        """How long to wait before all are judged again."""
        return self._limits.tick_s / (_HURRY if self._is_late else 1)

    @property
    def blind_s(self) -> float:
        """How long the observer has been blind, since it began."""
        return self._sight.blind_s

    @property
    def back_s(self) -> float:
        """When the observer last ceased to be blind, in sighted seconds."""
        return self._back_s

    def sighted_s(self, now: float) -> float:
        """Seconds in which the observer was not blind."""
        return self._sight.read(now)

    def silences(self, job: str | None, now: float) -> dict[str, tuple[float, bool]]:
        """How long each node of a job, or of all, is silent, and whether it is lost."""
        seen_s = self._sight.read(now)
        found: dict[str, tuple[float, bool]] = {}
        for name, company in self._companies.items():
            if job not in {None, name}:
                continue
            for is_lost, nodes in ((True, company.lost), (False, company.nodes)):
                for node, known in nodes.items():
                    said = (max(0.0, seen_s - known.seen_s), is_lost)
                    found[node] = min(found.get(node, said), said)
        return found

    def counts(self) -> tuple[int, int, int]:
        """Jobs, nodes that are heard, and nodes that are lost."""
        known = self._companies.values()
        return len(known), sum(len(c.nodes) for c in known), sum(len(c.lost) for c in known)

    def hear(self, beat: NodeBeat, now: float) -> Returned | None:
        """A sign of life; the finding that it makes, if it comes from a lost node."""
        company = self._companies.get(beat.job)
        if company is None:
            company = self._companies[beat.job] = Company(self._limits)
        return company.hear(beat, self._sight.read(now), now)

    def end_job(self, job: str) -> None:
        """The job is over."""
        company = self._companies.get(job)
        if company is not None:
            company.end()

    def judge(self, now: float, *, is_blind: bool, read_at: float = inf) -> list[Lost]:
        """Each node whose loss is new.

        `is_blind`: since the last call, beats may have gone past us unheard. `read_at`: all that
        was sent to us until then has been heard; what came later may still wait.
        """
        limits = self._limits
        # What is sent right after one tick is known to be read at the next, at the earliest.
        self.is_behind = not is_blind and now - read_at > limits.pause_s + limits.tick_s
        seen_s = self._sight.tick(now, is_blind=is_blind or self.is_behind)
        has_paused = now - self._ticked_at > 2 * limits.tick_s
        self._ticked_at = now
        if has_paused:
            self._woke_at = now
        # After a pause, let us first hear what was said meanwhile.
        is_unread = not is_blind and read_at < self._woke_at
        self._is_late = self.is_behind or has_paused or is_unread
        if self._is_late:
            return []
        was_blind, self._was_blind = self._was_blind, is_blind
        if is_blind:
            return []
        if was_blind:
            self._back_s = seen_s
        self._forget(seen_s)
        at = Moment(seen_s, now, read_at, self._back_s)
        shut = self._last_words()
        return [one for company in self._companies.values() for one in company.judge(at, shut)]

    def hails(self, now: float) -> list[NodeBeat]:
        """The last beats of nodes to be asked for another one, after they were judged."""
        seen_s = self._sight.read(now)
        if self._was_blind or self._is_late:
            return []
        asked = (
            beat for company in self._companies.values() for beat in company.hails(seen_s, now)
        )
        return list(itertools.islice(asked, _HAILS_MOST))

    def inquiries(self, now: float) -> list[tuple[NodeBeat, list[NodeBeat]]]:
        """Nodes that are to find out whether the wardens of silent ones live, and which."""
        seen_s = self._sight.read(now)
        if self._was_blind or self._is_late:
            return []
        return [one for company in self._companies.values() for one in company.inquiries(seen_s)]

    def knocks(self, now: float) -> list[NodeBeat]:
        """The last beats of nodes of which to ask whether anybody hears them."""
        seen_s = self._sight.read(now)
        if self._was_blind or self._is_late:
            return []
        asked = (
            beat
            for company in self._companies.values()
            for beat in company.knocks(seen_s, self._back_s)
        )
        return list(itertools.islice(asked, _HAILS_MOST))

    def knocked(self, asked: NodeBeat, is_there: bool | None, now: float) -> None:
        """What came of that: it was taken in, or nobody listens, or it was not taken in (None).

        What could not be told is not said here.
        """
        company = self._companies.get(asked.job)
        if company is None or (
            is_there is None and now - self._ticked_at > 2 * self._limits.tick_s
        ):
            return  # we had no turn, and may not have heard the answer
        if company.knocked(asked, is_there, self._sight.read(now)):
            self._shut.add((asked.job, asked.node))

    def still_lost(self) -> list[Lost]:
        """Findings to be said again: who should act on them may not have heard, or not yet."""
        known = (found for company in self._companies.values() for found in company.still_lost())
        return list(itertools.islice(known, _REMINDERS_MOST))

    def _last_words(self) -> list[float]:
        """When each node fell silent that nobody hears any more, in order."""
        found: list[float] = []
        for job, node in list(self._shut):
            company = self._companies.get(job)
            word_s = None if company is None else company.last_word_s(node)
            if word_s is None:
                self._shut.discard((job, node))
            else:
                found.append(word_s)
        return sorted(found)

    def _forget(self, seen_s: float) -> None:
        if seen_s - self._forgot_s < _FORGET_EVERY_S:
            return
        self._forgot_s = seen_s
        for job, company in list(self._companies.items()):
            company.forget(seen_s - self._limits.forget_s)
            if not company.nodes and not company.lost:
                del self._companies[job]
