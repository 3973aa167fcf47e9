"""How long each section of a job may take, learned from the times of all its ranks."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Literal

from msgspec.structs import replace

from everstep.messages import LimitsDocument, NodeBeat, SectionLimit, SectionSeen
from everstep_services.health.settings import LimitSettings

LimitSource = Literal["floor", "learned", "cap", "configured"]
"""The rule that set a limit, as in `limits_learned`."""
FIRST_STEP = "first-step"
"""The name under which people set the limit for everything up to a round's first step."""
_SECTIONS_MOST = 256
_CHANGED_RATIO = 0.1
_DESERTED_S = 60.0
"""A round that was silent for this time may be followed by one with a lower number."""


@dataclass(slots=True)
class ObservedRound:
    """The longest times of one round, on all of its nodes."""

    round: int
    config_fingerprint: str = ""
    sections: dict[str, SectionSeen] = field(default_factory=dict)
    first_step_s: float | None = None

    def see(self, sections: Iterable[SectionSeen]) -> None:
        """Note the longest times that a node reports."""
        for seen in sections:
            before = self.sections.get(seen.section)
            if not _is_sound(seen) or (before is None and len(self.sections) >= _SECTIONS_MOST):
                continue
            self.sections[seen.section] = seen if before is None else _merged(before, seen)


class LimitLearner:
    """The limits of one job. It keeps nothing that later beats do not repeat."""

    def __init__(self, settings: LimitSettings) -> None:
        self._settings = settings
        self._now: ObservedRound | None = None
        self._before: ObservedRound | None = None
        self.heard_s = -inf
        self.has_news = False
        """Something was heard that the document may lack."""

    def hear(self, beat: NodeBeat, now_s: float) -> None:
        """Take in the times of a beat."""
        if beat.round is None or not (beat.sections or beat.config_fingerprint):
            return
        observed = self._of_round(beat.round, beat.config_fingerprint, now_s)
        if observed is not None:
            observed.see(beat.sections)
            self.has_news = True

    def started(self, number: int, took_s: float, now_s: float) -> None:
        """Take in that a round made its first step `took_s` after the order to start."""
        observed = self._of_round(number, "", now_s)
        if observed is not None and isfinite(took_s) and took_s > (observed.first_step_s or 0.0):
            observed.first_step_s = took_s
            self.has_news = True

    def proposed(self, job: str, document: LimitsDocument | None) -> LimitsDocument | None:
        """The document with what was learned; None if the present one is near enough."""
        observed = self._now
        if observed is None:
            return None
        old = document or LimitsDocument(job=job, limits=(), first_step_limit_s=0.0, reason="")
        begins_anew = self._is_other_configuration(old, observed)
        base = _only_configured(old) if begins_anew else old
        fingerprint = observed.config_fingerprint or base.config_fingerprint
        if base.round == observed.round and base.config_fingerprint:
            fingerprint = base.config_fingerprint
        limits = {limit.section: limit for limit in base.limits}
        for section in {**limits, **observed.sections}:
            learned = self._learned(section, limits.get(section), base)
            if learned is not None:
                limits[section] = learned
        new = with_limits(
            LimitsDocument(
                job=job,
                limits=(),
                first_step_limit_s=0.0,
                reason=_rule(self._settings, observed.round, begins_anew),
                round=observed.round,
                config_fingerprint=fingerprint,
                first_step_longest_s=self._first_step_longest_s(base),
            ),
            limits,
            self._settings,
        )
        if document is None:
            return new if new.limits or new.first_step_longest_s is not None else None
        is_other = old.config_fingerprint != new.config_fingerprint
        return new if is_other or changed(old, new) else None

    def _of_round(self, number: int, fingerprint: str, now_s: float) -> ObservedRound | None:
        """The round to note it in; None if that round is over."""
        current = self._now
        if current is not None and number < current.round and now_s - self.heard_s < _DESERTED_S:
            return None
        self.heard_s = now_s
        if current is None or number != current.round:
            self._before, self._now = current, ObservedRound(number)
            current = self._now
        if fingerprint and not current.config_fingerprint:
            current.config_fingerprint = fingerprint
        return current

    def _is_other_configuration(self, old: LimitsDocument, observed: ObservedRound) -> bool:
        before, now = old.config_fingerprint, observed.config_fingerprint
        # Within a round, the first replica that writes settles the configuration.
        return bool(before and now and before != now and old.round != observed.round)

    def _learned(
        self, section: str, old: SectionLimit | None, base: LimitsDocument
    ) -> SectionLimit | None:
        """A section's new entry. A configured limit stays, and keeps what was learned below it."""
        assert self._now is not None
        seen = self._now.sections.get(section)
        if seen is not None and not is_enough(seen, self._settings):
            seen = None
        known_s = None if old is None else old.longest_s
        longest_s = self._longest_s(section, known_s, seen, base)
        if longest_s is None:
            return old
        kind = seen.kind if seen is not None else old.kind if old is not None else ""
        count = max(
            seen.observations if seen is not None else 0, old.observations if old is not None else 0
        )
        limit_s, source = _section_limit(longest_s, kind, self._settings)
        if old is not None and old.source == "configured":
            limit_s, source = old.limit_s, "configured"
        return SectionLimit(
            section=section,
            limit_s=round(limit_s, 3),
            source=source,
            longest_s=round(longest_s, 6),
            observations=count,
            kind=kind,
        )

    def _longest_s(
        self, section: str, known_s: float | None, seen: SectionSeen | None, base: LimitsDocument
    ) -> float | None:
        """The longest time: it rises at once, and falls by half with each whole round."""
        before = self._past(base)
        past = None if before is None else before.sections.get(section)
        if known_s is not None and past is not None and is_enough(past, self._settings):
            known_s = _fallen(known_s, past.longest_s)
        return _larger(known_s, None if seen is None else seen.longest_s)

    def _first_step_longest_s(self, base: LimitsDocument) -> float | None:
        assert self._now is not None
        before, known_s = self._past(base), base.first_step_longest_s
        if known_s is not None and before is not None and before.first_step_s is not None:
            known_s = _fallen(known_s, before.first_step_s)
        return _larger(known_s, self._now.first_step_s)

    def _past(self, base: LimitsDocument) -> ObservedRound | None:
        """The round before this one, if it is over and the document does not hold it yet."""
        now, before = self._now, self._before
        if now is None or before is None or (base.round or 0) >= now.round:
            return None
        same = {before.config_fingerprint or now.config_fingerprint, now.config_fingerprint}
        return before if len(same) == 1 else None


def with_limits(
    document: LimitsDocument, limits: Mapping[str, SectionLimit], settings: LimitSettings
) -> LimitsDocument:
    """The document with these limits, and the limit of the first step that follows from them."""
    configured = limits.get(FIRST_STEP)
    first_step_s = first_step_limit_s(document.first_step_longest_s, settings)
    if configured is not None and configured.source == "configured":
        first_step_s = configured.limit_s
    return replace(
        document,
        limits=tuple(limits[section] for section in sorted(limits)),
        first_step_limit_s=round(first_step_s, 3),
    )


def configured(
    document: LimitsDocument, section: str, limit_s: float, settings: LimitSettings
) -> LimitsDocument:
    """The document with an operator's limit; 0 s returns the section to what was learned."""
    limits = {limit.section: limit for limit in document.limits}
    old = limits.pop(section, None)
    if limit_s > 0:
        base = old or SectionLimit(section=section, limit_s=limit_s, source="configured")
        limits[section] = replace(base, limit_s=limit_s, source="configured")
    elif old is not None and old.longest_s is not None:
        learned_s, source = _section_limit(old.longest_s, old.kind, settings)
        limits[section] = replace(old, limit_s=round(learned_s, 3), source=source)
    return with_limits(document, limits, settings)


def changed(old: LimitsDocument, new: LimitsDocument) -> tuple[str, ...]:
    """The sections whose limit differs by more than a tenth, or was configured or released."""
    before = {limit.section: limit for limit in old.limits}
    after = {limit.section: limit for limit in new.limits}
    names = [
        name
        for name in sorted({**before, **after})
        if name not in before or name not in after or _differs(before[name], after[name])
    ]
    if FIRST_STEP not in names and _moved(old.first_step_limit_s, new.first_step_limit_s):
        names.append(FIRST_STEP)
    return tuple(names)


def _differs(old: SectionLimit, new: SectionLimit) -> bool:
    sources = {old.source, new.source}
    is_configured_anew = len(sources) == 2 and "configured" in sources
    return is_configured_anew or _moved(old.limit_s, new.limit_s)


def _moved(old_s: float, new_s: float) -> bool:
    return abs(new_s - old_s) > _CHANGED_RATIO * old_s


def _only_configured(document: LimitsDocument) -> LimitsDocument:
    """The document with operators' limits only: they hold for every configuration."""
    kept = tuple(
        SectionLimit(section=limit.section, limit_s=limit.limit_s, source=limit.source)
        for limit in document.limits
        if limit.source == "configured"
    )
    return replace(document, limits=kept, first_step_longest_s=None, config_fingerprint="")


def _rule(settings: LimitSettings, number: int, begins_anew: bool) -> str:
    anew = "the configuration has changed, so learning began again; " if begins_anew else ""
    return (
        f"{anew}{settings.factor:g} times the longest on any rank, as of round {number}: "
        f"{settings.floor_s:g} to {settings.cap_s:g} s, checkpoint and evaluation "
        f"{settings.long_floor_s:g} to {settings.long_cap_s:g} s, never below twice the longest"
    )


def first_step_limit_s(longest_s: float | None, settings: LimitSettings) -> float:
    """The limit for everything up to a round's first step, from the longest start so far."""
    if longest_s is None:
        return settings.first_step_cap_s
    cap_s = max(settings.first_step_cap_s, 2 * longest_s)
    return _between(settings.factor * longest_s, settings.first_step_floor_s, cap_s)[0]


def _section_limit(
    longest_s: float, kind: str, settings: LimitSettings
) -> tuple[float, LimitSource]:
    """The limit of a section from its longest time, and the rule that set it."""
    is_plain = kind == "plain"  # an unknown kind gets the longer time
    floor_s = settings.floor_s if is_plain else settings.long_floor_s
    cap_s = max(settings.cap_s if is_plain else settings.long_cap_s, 2 * longest_s)
    return _between(settings.factor * longest_s, floor_s, cap_s)


def is_enough(seen: SectionSeen, settings: LimitSettings) -> bool:
    """The section was seen often enough to learn from it."""
    return seen.observations >= (settings.observations if seen.kind == "plain" else 1)


def _between(wanted_s: float, floor_s: float, cap_s: float) -> tuple[float, LimitSource]:
    if wanted_s < floor_s:
        return floor_s, "floor"
    return (cap_s, "cap") if wanted_s > cap_s else (wanted_s, "learned")


def _fallen(known_s: float, seen_s: float) -> float:
    return known_s if seen_s >= known_s else (known_s + seen_s) / 2


def _larger(first: float | None, second: float | None) -> float | None:
    return max((value for value in (first, second) if value is not None), default=None)


def _merged(first: SectionSeen, second: SectionSeen) -> SectionSeen:
    return replace(
        second,
        kind=max(first.kind, second.kind, key=_patience),
        longest_s=max(first.longest_s, second.longest_s),
        observations=max(first.observations, second.observations),
    )


def _patience(kind: str) -> tuple[bool, str]:
    """Orders kinds: where ranks disagree about a section, it gets the longer time."""
    return kind != "plain", kind


def _is_sound(seen: SectionSeen) -> bool:
    return isfinite(seen.longest_s) and seen.longest_s >= 0 and seen.observations > 0
