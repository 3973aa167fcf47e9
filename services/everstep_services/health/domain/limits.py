"""How long each section of a job may take: learned from what all of its ranks were seen to do."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, isfinite

from msgspec.structs import replace

from everstep.messages import LimitsDocument, NodeBeat, SectionLimit, SectionSeen

FIRST_STEP = "first-step"
"""Stands for everything up to the end of a round's first step, where somebody sets its limit."""
_SECTIONS_MOST = 256
_CHANGED_RATIO = 0.1
_DESERTED_S = 60.0
"""A round of which nobody spoke for so long may be followed by one with a lower number."""


@dataclass(frozen=True, slots=True)
class LimitRules:
    """See `LimitSettings` for what each means."""

    factor: float
    floor_s: float
    cap_s: float
    long_floor_s: float
    long_cap_s: float
    first_step_floor_s: float
    first_step_cap_s: float
    observations: int

    def limit(self, longest_s: float, kind: str) -> tuple[float, str]:
        """For a section that was seen to take so long at most, and the rule that set it."""
        is_plain = kind == "plain"  # one that we do not know is given the longer time
        floor_s = self.floor_s if is_plain else self.long_floor_s
        cap_s = max(self.cap_s if is_plain else self.long_cap_s, 2 * longest_s)
        return _between(self.factor * longest_s, floor_s, cap_s)

    def first_step(self, longest_s: float | None) -> float:
        """For everything up to the end of a round's first step."""
        if longest_s is None:
            return self.first_step_cap_s
        cap_s = max(self.first_step_cap_s, 2 * longest_s)
        return _between(self.factor * longest_s, self.first_step_floor_s, cap_s)[0]

    def is_enough(self, seen: SectionSeen) -> bool:
        """Something may be concluded from it."""
        return seen.observations >= (self.observations if seen.kind == "plain" else 1)


@dataclass(slots=True)
class Observed:
    """What one round was seen to do, on all of its nodes."""

    round: int
    config_fingerprint: str = ""
    sections: dict[str, SectionSeen] = field(default_factory=dict)
    first_step_s: float | None = None

    def see(self, sections: Iterable[SectionSeen]) -> None:
        """Note the longest that any node saw."""
        for one in sections:
            before = self.sections.get(one.section)
            if not _is_sound(one) or (before is None and len(self.sections) >= _SECTIONS_MOST):
                continue
            self.sections[one.section] = one if before is None else _merged(before, one)


class Lessons:
    """What one job teaches. Nothing of it is needed after a restart: beats say it all again."""

    def __init__(self, rules: LimitRules) -> None:
        self._rules = rules
        self._now: Observed | None = None
        self._before: Observed | None = None
        self.heard_s = -inf
        self.has_news = False
        """There is something that the document may lack."""

    def hear(self, beat: NodeBeat, now_s: float) -> None:
        """A beat that says how long sections took."""
        if beat.round is None or not (beat.sections or beat.config_fingerprint):
            return
        observed = self._of_round(beat.round, beat.config_fingerprint, now_s)
        if observed is not None:
            observed.see(beat.sections)
            self.has_news = True

    def started(self, number: int, took_s: float, now_s: float) -> None:
        """A round has made its first step, so long after it was ordered to begin."""
        observed = self._of_round(number, "", now_s)
        if observed is not None and isfinite(took_s) and took_s > (observed.first_step_s or 0.0):
            observed.first_step_s = took_s
            self.has_news = True

    def proposed(self, job: str, document: LimitsDocument | None) -> LimitsDocument | None:
        """What the document should say; None if what it says is near enough."""
        observed = self._now
        if observed is None:
            return None
        old = document or LimitsDocument(job=job, limits=(), first_step_limit_s=0.0, reason="")
        begins_anew = self._is_other_configuration(old, observed)
        base = _only_configured(old) if begins_anew else old
        fingerprint = observed.config_fingerprint or base.config_fingerprint
        if base.round == observed.round and base.config_fingerprint:
            fingerprint = base.config_fingerprint
        limits = {one.section: one for one in base.limits}
        for section in {**limits, **observed.sections}:
            learned = self._learned(section, limits.get(section), base)
            if learned is not None:
                limits[section] = learned
        new = with_limits(
            LimitsDocument(
                job=job,
                limits=(),
                first_step_limit_s=0.0,
                reason=_rule(self._rules, observed.round, begins_anew),
                round=observed.round,
                config_fingerprint=fingerprint,
                first_step_longest_s=self._first_step_longest_s(base),
            ),
            limits,
            self._rules,
        )
        if document is None:
            return new if new.limits or new.first_step_longest_s is not None else None
        is_other = old.config_fingerprint != new.config_fingerprint
        return new if is_other or changed(old, new) else None

    def _of_round(self, number: int, fingerprint: str, now_s: float) -> Observed | None:
        """Where to note it; None for a round that is over."""
        known = self._now
        if known is not None and number < known.round and now_s - self.heard_s < _DESERTED_S:
            return None
        self.heard_s = now_s
        if known is None or number != known.round:
            self._before, self._now = known, Observed(number)
            known = self._now
        if fingerprint and not known.config_fingerprint:
            known.config_fingerprint = fingerprint
        return known

    def _is_other_configuration(self, old: LimitsDocument, observed: Observed) -> bool:
        said, here = old.config_fingerprint, observed.config_fingerprint
        # Within a round, whoever wrote first has settled which configuration it is.
        return bool(said and here and said != here and old.round != observed.round)

    def _learned(
        self, section: str, old: SectionLimit | None, base: LimitsDocument
    ) -> SectionLimit | None:
        """A section's entry after what was seen; a configured limit stays, with what it hides."""
        assert self._now is not None
        seen = self._now.sections.get(section)
        if seen is not None and not self._rules.is_enough(seen):
            seen = None
        known_s = None if old is None else old.longest_s
        longest_s = self._longest_s(section, known_s, seen, base)
        if longest_s is None:
            return old
        kind = seen.kind if seen is not None else old.kind if old is not None else ""
        count = max(
            seen.observations if seen is not None else 0,
            old.observations if old is not None else 0,
        )
        limit_s, source = self._rules.limit(longest_s, kind)
        if old is not None and old.source == "configured":
            limit_s, source = old.limit_s, old.source
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
        """Up at once; down by half, and only by a whole round that is over."""
        before = self._past(base)
        past = None if before is None else before.sections.get(section)
        if known_s is not None and past is not None and self._rules.is_enough(past):
            known_s = _fallen(known_s, past.longest_s)
        return _larger(known_s, None if seen is None else seen.longest_s)

    def _first_step_longest_s(self, base: LimitsDocument) -> float | None:
        assert self._now is not None
        before, known_s = self._past(base), base.first_step_longest_s
        if known_s is not None and before is not None and before.first_step_s is not None:
            known_s = _fallen(known_s, before.first_step_s)
        return _larger(known_s, self._now.first_step_s)

    def _past(self, base: LimitsDocument) -> Observed | None:
        """The round before this one, if the document does not know yet how it ended."""
        now, before = self._now, self._before
        if now is None or before is None or (base.round or 0) >= now.round:
            return None
        same = {before.config_fingerprint or now.config_fingerprint, now.config_fingerprint}
        return before if len(same) == 1 else None


def with_limits(
    document: LimitsDocument, limits: Mapping[str, SectionLimit], rules: LimitRules
) -> LimitsDocument:
    """The document with these limits, and the one for the first step that they come to."""
    configured = limits.get(FIRST_STEP)
    first_step_s = rules.first_step(document.first_step_longest_s)
    if configured is not None and configured.source == "configured":
        first_step_s = configured.limit_s
    return replace(
        document,
        limits=tuple(limits[section] for section in sorted(limits)),
        first_step_limit_s=round(first_step_s, 3),
    )


def configured(
    document: LimitsDocument, section: str, limit_s: float, rules: LimitRules
) -> LimitsDocument:
    """The document after an operator's word; 0 s leaves the section to what was learned."""
    limits = {one.section: one for one in document.limits}
    old = limits.pop(section, None)
    if limit_s > 0:
        base = old or SectionLimit(section=section, limit_s=limit_s, source="configured")
        limits[section] = replace(base, limit_s=limit_s, source="configured")
    elif old is not None and old.longest_s is not None:
        learned_s, source = rules.limit(old.longest_s, old.kind)
        limits[section] = replace(old, limit_s=round(learned_s, 3), source=source)
    return with_limits(document, limits, rules)


def changed(old: LimitsDocument, new: LimitsDocument) -> tuple[str, ...]:
    """The sections whose limit differs by more than a tenth, or is set by another hand."""
    before = {one.section: one for one in old.limits}
    after = {one.section: one for one in new.limits}
    names = [
        name
        for name in sorted({**before, **after})
        if name not in before or name not in after or _differs(before[name], after[name])
    ]
    if FIRST_STEP not in names and _moved(old.first_step_limit_s, new.first_step_limit_s):
        names.append(FIRST_STEP)
    return tuple(names)


def _differs(old: SectionLimit, new: SectionLimit) -> bool:
    hands = {old.source, new.source}
    is_other_hand = len(hands) == 2 and "configured" in hands
    return is_other_hand or _moved(old.limit_s, new.limit_s)


def _moved(old_s: float, new_s: float) -> bool:
    return abs(new_s - old_s) > _CHANGED_RATIO * old_s


def _only_configured(document: LimitsDocument) -> LimitsDocument:
    """What holds whatever the configuration is: an operator's word."""
    kept = tuple(
        SectionLimit(section=one.section, limit_s=one.limit_s, source=one.source)
        for one in document.limits
        if one.source == "configured"
    )
    return replace(document, limits=kept, first_step_longest_s=None, config_fingerprint="")


def _rule(rules: LimitRules, number: int, begins_anew: bool) -> str:
    anew = "the configuration is another one, so all was learned anew; " if begins_anew else ""
    return (
        f"{anew}{rules.factor:g} times the longest on any rank, as of round {number}: "
        f"{rules.floor_s:g} to {rules.cap_s:g} s, checkpoint and evaluation "
        f"{rules.long_floor_s:g} to {rules.long_cap_s:g} s, never below twice the longest"
    )


def _between(wanted_s: float, floor_s: float, cap_s: float) -> tuple[float, str]:
    if wanted_s < floor_s:
        return floor_s, "floor"
    return (cap_s, "cap") if wanted_s > cap_s else (wanted_s, "learned")


def _fallen(known_s: float, seen_s: float) -> float:
    return known_s if seen_s >= known_s else (known_s + seen_s) / 2


def _larger(one: float | None, other: float | None) -> float | None:
    return max((value for value in (one, other) if value is not None), default=None)


def _merged(one: SectionSeen, other: SectionSeen) -> SectionSeen:
    return replace(
        other,
        kind=max(one.kind, other.kind, key=_patience),
        longest_s=max(one.longest_s, other.longest_s),
        observations=max(one.observations, other.observations),
    )


def _patience(kind: str) -> tuple[bool, str]:
    """Where ranks do not agree what a section is, it is given the longer time."""
    return kind != "plain", kind


def _is_sound(one: SectionSeen) -> bool:
    return isfinite(one.longest_s) and one.longest_s >= 0 and one.observations > 0
