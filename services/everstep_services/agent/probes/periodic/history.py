"""Whether a probe has failed or recovered: several runs in a row decide, one does not. Pure."""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from everstep.messages import CheckResult, ProbeBeat
from everstep.observe.redaction import redact
from everstep_services.agent.probes.settings import ProbePolicy, ProbeSettings
from everstep_services.agent.probes.verdicts import state_of

ChangeKind = Literal["failed", "still_failing", "recovered", "flapping"]

SAY_AGAIN_S = 300.0
"""A probe that keeps failing is recorded again after this time, as by an examination."""
_FLAPS = 10
_FLAPS_WITHIN_S = 3600.0


@dataclass(frozen=True, slots=True)
class ProbeChange:
    """A change that must be recorded."""

    check: str
    kind: ChangeKind
    policy: ProbePolicy
    reason: str
    results: tuple[CheckResult, ...]
    """The results of the last run."""
    runs: int
    """How many runs in a row failed; for a recovery, passed."""
    lasted_s: float = 0.0
    """For a recovery: how long the probe had failed."""


@dataclass(slots=True)
class _Track:
    settings: ProbeSettings
    failures: int = 0
    passes: int = 0
    is_failing: bool = False
    since: float = 0.0
    said_at: float = 0.0
    last_failed: bool | None = None
    flips: deque[float] = field(default_factory=lambda: deque(maxlen=_FLAPS))
    flaps_said_at: float | None = None
    results: tuple[CheckResult, ...] = ()
    state: str = ""


class ProbeHistory:
    """The last runs of each probe. An unknown result counts neither way."""

    def __init__(self, probes: Mapping[str, ProbeSettings]) -> None:
        self._tracks = {name: _Track(settings) for name, settings in probes.items()}

    def take(self, check: str, results: Sequence[CheckResult], now: float) -> ProbeChange | None:
        """Count a run; return the change that it makes."""
        track, state = self._tracks[check], state_of(results)
        is_absent = bool(results) and all(it.state == "unsupported" for it in results)
        track.state = "unsupported" if is_absent else state
        if state == "unknown":
            return None
        has_failed = state == "failed"
        flapping = self._flap(check, track, now, has_failed=has_failed)
        if has_failed:
            track.failures, track.passes = track.failures + 1, 0
            track.results = tuple(results)
        else:
            track.failures, track.passes = 0, track.passes + 1
        return self._change(check, track, tuple(results), now) or flapping

    def _change(
        self, check: str, track: _Track, results: tuple[CheckResult, ...], now: float
    ) -> ProbeChange | None:
        settings, policy = track.settings, track.settings.policy
        if not track.is_failing and track.failures >= settings.failures:
            track.is_failing, track.since, track.said_at = True, now, now
            return ProbeChange(
                check, "failed", policy, _masked_reason(results), results, track.failures
            )
        if track.is_failing and track.passes >= settings.passes:
            track.is_failing = False
            lasted_s = now - track.since
            reason = f"it passes again after {lasted_s:.0f} s"
            return ProbeChange(check, "recovered", policy, reason, results, track.passes, lasted_s)
        if track.is_failing and track.failures and now - track.said_at >= SAY_AGAIN_S:
            track.said_at = now
            return ProbeChange(
                check, "still_failing", policy, _masked_reason(results), results, track.failures
            )
        return None

    def _flap(
        self, check: str, track: _Track, now: float, *, has_failed: bool
    ) -> ProbeChange | None:
        """Notice a probe that fails and passes in turn: it never acts, and is recorded hourly."""
        was, track.last_failed = track.last_failed, has_failed
        if was is None or was == has_failed:
            return None
        track.flips.append(now)
        is_many = len(track.flips) == _FLAPS and now - track.flips[0] <= _FLAPS_WITHIN_S
        is_said = track.flaps_said_at is not None and now - track.flaps_said_at < _FLAPS_WITHIN_S
        if not is_many or is_said:
            return None
        track.flaps_said_at = now
        reason = (
            f"it fails and passes in turn, {_FLAPS} changes within "
            f"{now - track.flips[0]:.0f} s, so nothing is done"
        )
        warning = CheckResult(check=check, state="warning", reason=reason, failure_class="watch")
        return ProbeChange(check, "flapping", track.settings.policy, reason, (warning,), 0)

    @property
    def failing(self) -> dict[str, tuple[CheckResult, ...]]:
        """The probes that have failed and not recovered, each with its last failed run."""
        return {name: track.results for name, track in self._tracks.items() if track.is_failing}

    @property
    def beats(self) -> tuple[ProbeBeat, ...]:
        """All probes as beats show them, by name."""
        return tuple(
            ProbeBeat(
                check=name,
                every_s=track.settings.every_s,
                policy=track.settings.policy,
                state=track.state,
                failures=track.failures,
                failures_limit=track.settings.failures,
                has_failed=track.is_failing,
            )
            for name, track in sorted(self._tracks.items())
        )

    def failures(self, name: str) -> int:
        """In how many runs in a row this probe has failed."""
        return self._tracks[name].failures


def _reason(results: Sequence[CheckResult]) -> str:
    failed = [result for result in results if result.state == "failed"]
    texts = [
        ": ".join(filter(None, [result.subject, result.reason or result.code or "failed"]))
        for result in failed
    ]
    return "; ".join(texts)


def _masked_reason(results: tuple[CheckResult, ...]) -> str:
    """As on record: the console and the reason of a round's end show no password either."""
    return redact(_reason(results))
