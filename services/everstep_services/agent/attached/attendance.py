"""The consequences of ranks that come and go on this node: rounds, incidents, the job's end.

Pure: every method takes `now` and returns what is new. Pages of older rounds are ignored.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from everstep.incident_causes import IncidentCause
from everstep.incident_outcomes import IncidentOutcome
from everstep.messages import Ledger
from everstep_services.agent.core.exit import RankExit, exit_sentence

JobEnd = Literal["done", "failed", "unknown"]

_ORDERED = frozenset({"SIGTERM", "SIGINT", "SIGHUP"})
"""The signals with which launchers stop ranks after another one has failed."""


@dataclass(frozen=True, slots=True)
class RoundBegins:
    """The first rank of a round is here."""

    round: int


@dataclass(frozen=True, slots=True)
class IncidentOpens:
    """A rank has failed by itself, or has stalled: an incident opens, unless one is open."""

    rank: int
    reason: str
    fact: str
    trigger: IncidentCause = "rank_exited"
    waited_s: float | None = None
    """The time since the last progress of a rank that has stalled."""


@dataclass(frozen=True, slots=True)
class RoundEnds:
    """No rank of the round is left here."""

    round: int
    cause: IncidentCause
    reason: str
    rank: int | None
    fact: str | None
    lasted_s: float


@dataclass(frozen=True, slots=True)
class IncidentCloses:
    """The open incident is over."""

    outcome: IncidentOutcome
    reason: str
    next_round: int | None
    ledger: Ledger
    lost_steps: int | None = None
    """0 after a stall: no step is made again. None if that is not known."""


@dataclass(frozen=True, slots=True)
class JobOver:
    """The launcher starts nobody again: the outcome of the job, as far as it was seen."""

    state: JobEnd
    reason: str
    exit_code: int | None


Act = RoundBegins | IncidentOpens | RoundEnds | IncidentCloses | JobOver


@dataclass(slots=True)
class _Present:
    pid: int
    ending: RankExit | None = None
    fact: str = ""


@dataclass(slots=True)
class _Trouble:
    round: int
    at: float
    reason: str
    """The stall or the failure that it began with."""
    is_stall: bool = False
    """So far no rank has failed: some have only stalled."""
    detect_s: float = 0.0
    """From the last progress until the stall was found."""
    gone_at: float | None = None
    back_at: float | None = None


@dataclass(slots=True)
class Attendance:
    """The ranks of the newest round that have come to this node."""

    expected: int
    """The number of ranks that will come; 0 if not known."""
    max_restarts: int
    """How often the launcher starts them again."""
    linger_s: float
    """How long they may stay away."""
    began: float
    round: int = 0
    _ranks: dict[int, _Present] = field(default_factory=dict)
    _round_began: float = 0.0
    _gone_at: float | None = None
    _first_bad: int | None = None
    _trouble: _Trouble | None = None
    _without: set[int] = field(default_factory=set)
    """Ranks that failed, and without which the others have gone on in their processes."""

    @property
    def live(self) -> tuple[int, ...]:
        """The ranks that are here."""
        return tuple(rank for rank, presence in self._ranks.items() if presence.ending is None)

    @property
    def all(self) -> tuple[int, ...]:
        """The ranks of the round, also those that are gone."""
        return tuple(sorted(self._ranks))

    def is_news(self, number: int, rank: int, pid: int) -> bool:
        """The page is of this round or a later one, and new."""
        record = self._ranks.get(rank) if number == self.round else None
        return number >= self.round and (record is None or record.pid != pid)

    def came(self, number: int, rank: int, pid: int, now: float) -> list[Act]:
        """A rank has opened its page."""
        acts: list[Act] = []
        if number > self.round:
            if self.live:
                acts.append(self._ends(now))
            self.round, self._round_began, self._first_bad = number, now, None
            self._ranks.clear()
            self._without.clear()
            acts.append(RoundBegins(number))
            if self._trouble is not None:
                self._trouble.back_at = now
        self._ranks[rank] = _Present(pid)
        self._gone_at = None
        return acts

    def stepped(self, now: float) -> list[Act]:
        """A rank has made its first step of the round."""
        trouble = self._trouble
        if trouble is None or trouble.round == self.round:
            return []
        return [self._closes(trouble, "recovered", f"round {self.round} makes steps again", now)]

    def stalled(
        self, rank: int, reason: str, fact: str, now: float, waited_s: float = 0.0
    ) -> list[Act]:
        """A rank has stalled, and has made no progress for this long."""
        if self._trouble is not None:
            return []
        self._trouble = _Trouble(self.round, now, reason, is_stall=True, detect_s=waited_s)
        return [IncidentOpens(rank, reason, fact, "rank_stalled", waited_s)]

    def moves(self, now: float) -> list[Act]:
        """No rank is stalled any more."""
        trouble = self._trouble
        if trouble is None or not trouble.is_stall:
            return []
        return [self._closes(trouble, "recovered", "all ranks make progress again", now)]

    def gone(self, rank: int, ending: RankExit, fact: str, now: float) -> list[Act]:
        """The process of a rank is gone."""
        record = self._ranks[rank]
        record.ending, record.fact = ending, fact
        acts: list[Act] = []
        if _has_failed(ending) and self._first_bad is None:
            self._first_bad = rank
            if self._trouble is None:
                reason = self._sentence(rank, ending)
                self._trouble = _Trouble(self.round, now, reason)
                acts.append(IncidentOpens(rank, reason, fact))
            self._trouble.is_stall = False
            if rank in self._without:
                acts += self.went_on((), now)
        if not self.live:
            self._gone_at = now
            acts.append(self._ends(now))
            if self._trouble is not None and self._trouble.gone_at is None:
                self._trouble.gone_at = now
        return acts

    def went_on(self, lost: Iterable[int], now: float) -> list[Act]:
        """The living ranks have restarted in their processes, without those that failed.

        They may tell it before the end of a lost rank is seen.
        """
        bad, trouble = self._first_bad, self._trouble
        endings = {rank: it.ending for rank, it in self._ranks.items()}
        self._without.update(rank for rank, it in endings.items() if it and _has_failed(it))
        self._without.update(lost)
        ending = None if bad is None else endings[bad]
        if bad is None or ending is None or trouble is None:
            return []
        self._first_bad = self._trouble = None
        reason = (
            f"{self._sentence(bad, ending)}; the others restarted in their processes without it"
        )
        ledger = Ledger(other_s=round(now - trouble.at, 3))
        return [IncidentCloses("recovered", reason, self.round, ledger)]

    def is_over(self, now: float, *, launcher_lives: bool) -> bool:
        """Nobody is here, and nobody is expected."""
        if self.live:
            return False
        if self._gone_at is None:
            return now >= self.began + self.linger_s
        all_good = self._are_all_good
        may_return = self.round <= self.max_restarts and not all_good
        if may_return and launcher_lives:
            return False  # however long it takes until they are here again
        is_complete = 0 < self.expected <= len(self._ranks)
        linger_s = 0.0 if is_complete and not may_return else self.linger_s
        return now >= self._gone_at + linger_s

    def over(self, now: float, why: str = "") -> list[Act]:
        """The actions at the end; `why` the agent stops watching, if ranks may still run."""
        if not self._ranks:
            return []
        acts: list[Act] = []
        bad = None if self._first_bad is None else self._ranks[self._first_bad].ending
        state: JobEnd = "unknown"
        code = None
        reason = why or "its ranks are gone, and nobody saw how all of them ended"
        if bad is not None and self._first_bad is not None:
            state = "failed"
            reason = f"{self._sentence(self._first_bad, bad)}; no other round followed"
            code = bad.code
        elif self._are_all_good:
            reason = "all ranks that were watched have ended well"
            if self._without:
                named = ", ".join(f"rank {rank}" for rank in sorted(self._without))
                reason += f", but {named}: the others went on in their processes without it"
            state, code = "done", 0
        if self._trouble is not None:
            outcome: IncidentOutcome = "recovered" if state == "done" else "failed"
            why = f"round {self.round} followed, and {reason}" if self._is_followed else reason
            acts.append(self._closes(self._trouble, outcome, why, now, has_stepped=False))
        return [*acts, JobOver(state, reason, code)]

    @property
    def _are_all_good(self) -> bool:
        """Whether all ranks have ended well, except those without which the others went on."""
        left = [it.ending for rank, it in self._ranks.items() if rank not in self._without]
        return all(ending is not None and ending.is_good for ending in left)

    @property
    def _is_followed(self) -> bool:
        return self._trouble is not None and self._trouble.round < self.round

    def _sentence(self, rank: int, ending: RankExit) -> str:
        return exit_sentence(rank, ending, self.expected)

    def _ends(self, now: float) -> RoundEnds:
        lasted_s, bad = now - self._round_began, self._first_bad
        if bad is None and self._are_all_good:
            reason = "all ranks have ended well"
            return RoundEnds(self.round, "done", reason, None, None, lasted_s)
        if bad is None:
            bad = next(r for r, it in self._ranks.items() if not (it.ending and it.ending.is_good))
        ending, fact = self._ranks[bad].ending, self._ranks[bad].fact
        if ending is None:
            reason = f"rank {bad} was still here when the next round began"
        elif self._first_bad is None:
            reason = f"rank {bad} {ending.text}"
        else:
            reason = self._sentence(bad, ending)
        return RoundEnds(self.round, "rank_exited", reason, bad, fact or None, lasted_s)

    def _closes(
        self,
        trouble: _Trouble,
        outcome: IncidentOutcome,
        reason: str,
        now: float,
        *,
        has_stepped: bool = True,
    ) -> IncidentCloses:
        self._trouble = None
        gone_at = now if trouble.gone_at is None else trouble.gone_at
        back_at = now if trouble.back_at is None else max(trouble.back_at, gone_at)
        away_s, back_s = round(back_at - gone_at, 3), round(now - back_at, 3)
        is_back = trouble.back_at is not None
        if not reason.startswith(trouble.reason):
            reason = f"{trouble.reason}; {reason}"
        detect_s = round(trouble.detect_s, 3)
        if trouble.is_stall:
            ledger = Ledger(detect_s=detect_s, other_s=round(now - trouble.at, 3))
            is_back = outcome == "recovered"
            lost_steps = 0 if is_back and trouble.round == self.round else None
            number = self.round if is_back else None
            return IncidentCloses(outcome, reason, number, ledger, lost_steps)
        is_stepping = has_stepped and outcome == "recovered"
        ledger = Ledger(
            detect_s=detect_s,
            stop_s=round(gone_at - trouble.at, 3),
            start_s=away_s if is_back else 0.0,
            first_step_s=back_s if is_stepping else 0.0,
            other_s=(0.0 if is_back else away_s) + (0.0 if is_stepping else back_s),
        )
        next_round = self.round if outcome == "recovered" else None
        return IncidentCloses(outcome, reason, next_round, ledger)


def _has_failed(ending: RankExit) -> bool:
    return (
        ending.error is not None
        or bool(ending.code)
        or (ending.signal is not None and ending.signal not in _ORDERED)
    )
