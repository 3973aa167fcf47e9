"""Which nodes are lost: neither blindness of health nor moving training explains their silence.

Moving training does not explain a connection that closed and stays closed.
"""

import itertools
from math import inf

from everstep.messages import NodeBeat
from everstep_services.health.domain.findings import NodeLoss, NodeReturn
from everstep_services.health.domain.job_nodes import JobNodes, ObserverTime
from everstep_services.health.settings import HealthSettings

_FORGET_EVERY_S = 60.0
_HAILS_MOST = 256
"""At once. Where more nodes are silent, the cause is not in the nodes."""
_REMINDERS_MOST = 1024
_PROMPT_TICKS = 3
"""Messages that came within this time count as read at once."""
_HURRY = 4
"""While health is late, it judges this many times in the time of one tick."""


class ObserverClock:
    """The observer's monotonic clock without the time in which it was blind.

    Silence by this clock is silence that health has witnessed. Read it often: a process that did
    not read it for more than `pause_s` was stopped or got no turn, and the messages of that time
    still wait in a queue.
    """

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._awake_at: float | None = None
        self._ticked_s = 0.0
        self.blind_s = 0.0

    def read(self, now: float) -> float:
        """The seconds in which the observer was not blind."""
        if self._awake_at is not None and now - self._awake_at > self._pause_s:
            self.blind_s += now - self._awake_at
        self._awake_at = now
        return now - self.blind_s

    def tick(self, now: float, *, is_blind: bool) -> float:
        """The same, once a tick; with `is_blind` the clock stands still since the last tick."""
        seen_s = self.read(now)
        if is_blind and seen_s > self._ticked_s and self._ticked_s:
            self.blind_s += seen_s - self._ticked_s
            seen_s = self._ticked_s
        self._ticked_s = seen_s
        return seen_s


class Fleet:
    """The nodes of all jobs. The same calls give the same findings on every machine.

    Call `hear` for each beat and `judge` every `tick_s`; both take the monotonic clock as `now`.
    """

    def __init__(self, settings: HealthSettings) -> None:
        self._settings = settings
        self._jobs: dict[str, JobNodes] = {}
        self._clock = ObserverClock(settings.pause_most_s)
        self._was_blind = self._is_late = self._has_come_back = False
        self._closed: set[tuple[str, str]] = set()
        """Job and node of each connection that a probe has found closed."""
        self._ticked_at = inf
        self._woke_at = -inf
        self._read_at = inf
        self.is_behind = False
        """At the last judgement, messages had waited too long to be read."""
        self._back_s = -inf
        self._forgot_s = -inf

    @property
    def tick_s(self) -> float:
        """The time to wait before the next judgement."""
        return self._settings.tick_s / (_HURRY if self._is_late else 1)

    @property
    def blind_s(self) -> float:
        """How long the observer has been blind since its start."""
        return self._clock.blind_s

    @property
    def back_s(self) -> float:
        """When the observer last ceased to be blind, by its clock."""
        return self._back_s

    def seen_s(self, now: float) -> float:
        """The time by the observer's clock, which stands still while the observer is blind."""
        return self._clock.read(now)

    def silences(self, job: str | None, now: float) -> dict[str, tuple[float, bool]]:
        """How long each node of a job, or of all, is silent, and whether it is lost."""
        seen_s = self._clock.read(now)
        silences: dict[str, tuple[float, bool]] = {}
        for name, job_nodes in self._jobs.items():
            if job not in {None, name}:
                continue
            for is_lost, nodes in ((True, job_nodes.lost), (False, job_nodes.nodes)):
                for node, state in nodes.items():
                    silence = (max(0.0, seen_s - state.seen_s), is_lost)
                    silences[node] = min(silences.get(node, silence), silence)
        return silences

    def counts(self) -> tuple[int, int, int]:
        """The numbers of jobs, of nodes that are heard, and of nodes that are lost."""
        jobs = self._jobs.values()
        return len(jobs), sum(len(job.nodes) for job in jobs), sum(len(job.lost) for job in jobs)

    def hear(self, beat: NodeBeat, now: float) -> NodeReturn | None:
        """Take in a beat; return the finding that it makes, if the node was lost."""
        job = self._jobs.get(beat.job)
        if job is None:
            job = self._jobs[beat.job] = JobNodes(self._settings)
        late_s = now - min(self._ticked_at, self._read_at)
        if late_s <= _PROMPT_TICKS * self._settings.tick_s:
            late_s = 0.0
        return job.hear(beat, self._clock.read(now), now, late_s)

    def end_job(self, name: str) -> None:
        """The job is over: its nodes are not lost when they fall silent."""
        job = self._jobs.get(name)
        if job is not None:
            job.end()

    def come_back(self) -> None:
        """Servers of the bus are reached again: nodes behind them may still be reconnecting."""
        self._has_come_back = True

    def judge(self, now: float, *, is_blind: bool, read_at: float = inf) -> list[NodeLoss]:
        """The losses that are new.

        `is_blind`: beats may have been missed since the last call. `read_at`: health has read every
        message that was sent to it before this time; later ones may still wait.
        """
        settings = self._settings
        # What is sent right after one tick is known to be read at the next tick, at the earliest.
        lag_most_s = settings.pause_most_s + settings.tick_s
        self._read_at = read_at
        self.is_behind = not is_blind and now - read_at > lag_most_s
        seen_s = self._clock.tick(now, is_blind=is_blind or self.is_behind)
        has_paused = now - self._ticked_at > 2 * settings.tick_s
        self._ticked_at = now
        if has_paused:
            self._woke_at = now
        # After a pause, first read the messages that were sent during the pause.
        is_unread = not is_blind and read_at < self._woke_at
        self._is_late = self.is_behind or has_paused or is_unread
        if self._is_late:
            return []
        was_blind, self._was_blind = self._was_blind, is_blind
        if is_blind:
            return []
        if was_blind or self._has_come_back:
            self._back_s, self._has_come_back = seen_s, False
        self._forget(seen_s)
        time = ObserverTime(seen_s, now, read_at, self._back_s)
        disconnected = self._disconnected()
        return [loss for job in self._jobs.values() for loss in job.judge(time, disconnected)]

    def hails(self, now: float) -> list[NodeBeat]:
        """The last beats of the nodes to hail now. Call it after `judge`."""
        seen_s = self._clock.read(now)
        if self._was_blind or self._is_late:
            return []
        beats = (beat for job in self._jobs.values() for beat in job.hails(seen_s, now))
        return list(itertools.islice(beats, _HAILS_MOST))

    def inquiries(self, now: float) -> list[tuple[NodeBeat, list[NodeBeat]]]:
        """The nodes to ask whether the wardens of silent nodes live, each with those nodes."""
        seen_s = self._clock.read(now)
        if self._was_blind or self._is_late:
            return []
        return [inquiry for job in self._jobs.values() for inquiry in job.inquiries(seen_s)]

    def probes(self, now: float) -> list[NodeBeat]:
        """The last beats of the nodes whose connection to probe now."""
        seen_s = self._clock.read(now)
        if self._was_blind or self._is_late:
            return []
        beats = (beat for job in self._jobs.values() for beat in job.probes(seen_s, self._back_s))
        return list(itertools.islice(beats, _HAILS_MOST))

    def probed(self, asked: NodeBeat, is_there: bool | None, now: float) -> None:
        """Note the result of a probe.

        True: the node's agent took it in. False: the node has no subscriber. None: it has one, but
        nobody took the probe in. A probe that failed otherwise has no result.
        """
        job = self._jobs.get(asked.job)
        has_paused = now - self._ticked_at > 2 * self._settings.tick_s
        if job is None or (is_there is None and has_paused):
            return  # health had no turn, and may have missed the answer
        if job.probed(asked, is_there, self._clock.read(now)):
            self._closed.add((asked.job, asked.node))

    def still_lost(self) -> list[NodeLoss]:
        """The losses to report again: rendezvous may have missed them, or heard the node since."""
        losses = (loss for job in self._jobs.values() for loss in job.still_lost())
        return list(itertools.islice(losses, _REMINDERS_MOST))

    def _disconnected(self) -> list[float]:
        """When each node with a closed connection was last heard, sorted."""
        times_s: list[float] = []
        for name, node in list(self._closed):
            job = self._jobs.get(name)
            heard_s = None if job is None else job.disconnected_s(node)
            if heard_s is None:
                self._closed.discard((name, node))
            else:
                times_s.append(heard_s)
        return sorted(times_s)

    def _forget(self, seen_s: float) -> None:
        if seen_s - self._forgot_s < _FORGET_EVERY_S:
            return
        self._forgot_s = seen_s
        for name, job in list(self._jobs.items()):
            job.forget(seen_s - self._settings.forget_after_s)
            if not job.nodes and not job.lost:
                del self._jobs[name]
