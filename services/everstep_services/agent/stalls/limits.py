"""How long a rank may go without progress, by its position."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from everstep.messages import LimitsDocument
from everstep.messages.questions.health import LEAST_LIMIT_S, MOST_LIMIT_S
from everstep.units import seconds
from everstep_services.agent.settings import AgentSettings
from trainer_sdk.layout import NAME_BYTES
from trainer_sdk.page_content import SectionKind

FIRST_STEP = "first-step"
STEP = "step"
OUTSIDE = "outside"
HEARTBEAT: Final = "heartbeat"
SPECIAL = (FIRST_STEP, STEP, OUTSIDE, HEARTBEAT)
"""Names of limits that are not sections. A section may have one of these names, too."""
BY_HAND = "configured"
BY_OPERATOR = "everstep limits"
BY_SETTING = "[agent] limits"
"""The origin of limits that the settings give."""
_IDLE_FACTOR = 3.0


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit, and the rule that set it."""

    s: float
    source: str
    name: str = ""
    """The name of the limited thing."""
    origin: str = ""
    """Where a person has set it: `--limit`, a setting, `everstep limits`; empty if nobody has."""


def is_by_hand(limit: Limit) -> bool:
    """Whether a person has set it."""
    return limit.source == BY_HAND


@dataclass(frozen=True, slots=True)
class LimitRules:
    """The limits of a job before anything is learned, and those set by hand."""

    agent: AgentSettings = field(default_factory=AgentSettings)
    """Its limits hold until others are learned."""
    warmup_steps: int | None = None
    """The number of first steps that may take as long as the first; None for the number that the
    script gives, or only the first.
    """
    configured: Mapping[str, float] = field(default_factory=dict)
    """By section; also `first-step`, `step`, `outside` and `heartbeat`."""
    origins: Mapping[str, str] = field(default_factory=dict)
    """Where each of these was set."""
    is_outside_late: bool = False
    """A limit that was set for `outside` acts only from the first step on."""


def read_limits(texts: Iterable[str], origin: str) -> dict[str, float]:
    """The limits in texts such as `forward=90s`, by name. Raises ValueError, with the remedy."""
    limits: dict[str, float] = {}
    for text in texts:
        name, equals, value = text.rpartition("=")
        limit_s = seconds(value)
        if not equals or not name.strip() or not limit_s:
            raise ValueError(f"{origin} {text!r}: write NAME=SECONDS, for instance forward=90s")
        if limit_s < LEAST_LIMIT_S:
            raise ValueError(f"{origin} {text!r} is too short: the least is {LEAST_LIMIT_S:g}s")
        if limit_s > MOST_LIMIT_S:
            raise ValueError(
                f"{origin} {text!r} is too long: the most is 366 days, {MOST_LIMIT_S:.0f}s"
            )
        if len(name.strip().encode()) > NAME_BYTES:
            raise ValueError(
                f"{origin} {text[:NAME_BYTES]!r}…: the names of sections are known by "
                f"{NAME_BYTES} bytes at most; write fewer"
            )
        limits[name.strip()] = limit_s
    return limits


class StallLimits:
    """The limits in force: set by hand, else learned, else the default.

    The latest limit set by hand wins: those that `everstep limits` has set while the job runs,
    then those that the agent was started with.
    """

    def __init__(self, rules: LimitRules) -> None:
        self.rules = rules
        self.document: LimitsDocument | None = None
        self._learned: dict[str, Limit] = {}
        self._operators: dict[str, Limit] = {}
        self._first_step: Limit | None = None

    @property
    def is_learning(self) -> bool:
        """Whether nothing was learned yet."""
        return not self._learned

    def learn(self, document: LimitsDocument | None) -> None:
        """Health has published limits, or has none."""
        self.document = document
        self._learned, self._operators, self._first_step = {}, {}, None
        if document is None:
            return
        for limit in document.limits:
            name = limit.section or OUTSIDE
            if limit.source == BY_HAND:
                self._operators[name] = Limit(limit.limit_s, BY_HAND, name, BY_OPERATOR)
            else:  # a section may be called `outside`, too
                self._learned[limit.section] = Limit(limit.limit_s, limit.source, name)
        if document.first_step_longest_s is not None and FIRST_STEP not in self._operators:
            self._first_step = Limit(document.first_step_limit_s, "learned", FIRST_STEP)

    def by_hand(self, name: str) -> Limit | None:
        """The limit set by hand for this name, wherever the name is open."""
        told = self._operators.get(name)
        limit_s = self.rules.configured.get(name)
        if told is not None or limit_s is None:
            return told
        return Limit(limit_s, BY_HAND, name, self.rules.origins.get(name, ""))

    def all_by_hand(self) -> Mapping[str, Limit]:
        """All limits set by hand, by name."""
        names = {**self.rules.configured, **self._operators}
        return {name: limit for name in names if (limit := self.by_hand(name)) is not None}

    def first_step(self) -> Limit:
        """Up to the end of the first step."""
        return self.by_hand(FIRST_STEP) or self._usual_first_step()

    def step(self) -> Limit:
        """From one step to the next, whatever sections come and go."""
        return self.by_hand(STEP) or self.usual_step()

    def section(self, name: str, kind: SectionKind) -> Limit:
        """In a section; the empty name means the time outside all of them."""
        return self.by_hand(name or OUTSIDE) or self.usual_section(name, kind)

    def heartbeat(self) -> Limit:
        """From one heartbeat to the next, where the script makes no steps."""
        return self.by_hand(HEARTBEAT) or self.usual_heartbeat()

    def usual_step(self) -> Limit:
        """The limit of heartbeats, if nobody has set it."""
        learned = self._learned.get(STEP)
        if learned is not None and learned.s > self.rules.agent.step_limit_s:
            return learned
        return Limit(self.rules.agent.step_limit_s, "default", STEP)

    def usual_section(self, name: str, kind: SectionKind) -> Limit:
        """If nobody has set it."""
        learned = self._learned.get(name)
        return learned if learned is not None else self._default(name or OUTSIDE, kind)

    def usual_heartbeat(self) -> Limit:
        """The limit of a first heartbeat: as long as a first step, until heartbeats are regular.

        A script may beat while it loads, and be silent in its first step.
        """
        longest_s = max(self.first_step().s, self._usual_first_step().s)
        return self._learned.get(HEARTBEAT, Limit(longest_s, "default", HEARTBEAT))

    def idle_compile_s(self, limit: Limit) -> float:
        """For how long a compilation may compute nothing, if this is the limit."""
        return max(self.rules.agent.idle_compile_s, _IDLE_FACTOR * limit.s)

    def named(self) -> frozenset[str]:
        """Sections with a limit of their own."""
        return frozenset({*self.all_by_hand(), *self._learned} - {*SPECIAL, ""})

    def shortest_s(self) -> float:
        """A monitor that looks this often misses no limit."""
        values = [limit.s for limit in (*self._learned.values(), *self._operators.values())]
        values += [self.rules.agent.section_limit_s, self.rules.agent.first_step_limit_s]
        return min([*self.rules.configured.values(), *values])

    def _usual_first_step(self) -> Limit:
        return self._first_step or Limit(self.rules.agent.first_step_limit_s, "default", FIRST_STEP)

    def _default(self, name: str, kind: SectionKind) -> Limit:
        match kind:
            case SectionKind.CHECKPOINT:
                return Limit(self.rules.agent.checkpoint_limit_s, "default", name)
            case SectionKind.EVALUATION:
                return Limit(self.rules.agent.evaluation_limit_s, "default", name)
            case SectionKind.PLAIN:
                return Limit(self.rules.agent.section_limit_s, "default", name)
