"""How long a rank may go without progress, by where it is."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from everstep.messages import LimitsDocument
from trainer_sdk.page import Kind

FIRST_STEP = "first-step"
STEP = "step"
OUTSIDE = "outside"
_IDLE_FACTOR = 3.0


@dataclass(frozen=True, slots=True)
class Limit:
    """A limit, and the rule that set it."""

    s: float
    source: str


@dataclass(frozen=True, slots=True)
class LimitRules:
    """What holds for this job before anything is learned, and what was set by hand."""

    first_step_s: float = 7200.0
    """For everything up to the end of the first step of a round."""
    section_s: float = 1800.0
    """For a section, and for the time outside all of them."""
    checkpoint_s: float = 7200.0
    evaluation_s: float = 7200.0
    step_s: float = 7200.0
    """For a step in which sections come and go."""
    busy_factor: float = 4.0
    """A rank of which only its processor time is seen may take so many times as long."""
    idle_compile_s: float = 300.0
    """A compilation has hung that computes nothing for so long, and for `_IDLE_FACTOR` times the
    limit of where it is."""
    interpreter_within_s: float = 0.5
    """How long a finding waits for what the rank's interpreter does."""
    configured: Mapping[str, float] = field(default_factory=dict)
    """By section; also `first-step`, `step` and `outside`."""


class Limits:
    """What is in force: set by hand, else learned, else the default."""

    def __init__(self, rules: LimitRules) -> None:
        self.rules = rules
        self.document: LimitsDocument | None = None
        self._learned: dict[str, Limit] = {}
        self._first_step: Limit | None = None

    @property
    def is_learning(self) -> bool:
        """Nothing was learned yet."""
        return not self._learned

    def learn(self, document: LimitsDocument | None) -> None:
        """Health has published limits, or has none."""
        self.document = document
        if document is None:
            self._learned, self._first_step = {}, None
            return
        self._learned = {one.section: Limit(one.limit_s, one.source) for one in document.limits}
        self._first_step = self._learned.pop(FIRST_STEP, None)
        if self._first_step is None and document.first_step_longest_s is not None:
            self._first_step = Limit(document.first_step_limit_s, "learned")

    def first_step(self) -> Limit:
        """Up to the end of the first step."""
        default = self._first_step or Limit(self.rules.first_step_s, "default")
        return self._configured(FIRST_STEP) or default

    def step(self) -> Limit:
        """From one step to the next, whatever sections come and go."""
        learned = self._learned.get(STEP)
        default = Limit(self.rules.step_s, "default")
        is_better = learned is not None and (
            learned.source == "configured" or learned.s > default.s
        )
        return self._configured(STEP) or (learned if learned and is_better else default)

    def section(self, name: str, kind: Kind) -> Limit:
        """In a section; the empty name stands for the time outside all of them."""
        configured = self._configured(name or OUTSIDE)
        if configured is not None:
            return configured
        learned = self._learned.get(name)
        return learned if learned is not None else self._default(kind)

    def idle_compile_s(self, limit: Limit) -> float:
        """For how long a compilation may compute nothing, where this would be the limit."""
        return max(self.rules.idle_compile_s, _IDLE_FACTOR * limit.s)

    def named(self) -> frozenset[str]:
        """Sections with a limit of their own."""
        special = {FIRST_STEP, STEP, OUTSIDE, ""}
        return frozenset({*self.rules.configured, *self._learned} - special)

    def shortest_s(self) -> float:
        """Whoever looks this often misses no limit."""
        known = [limit.s for limit in self._learned.values()]
        rules = self.rules
        return min([rules.section_s, rules.first_step_s, *rules.configured.values(), *known])

    def _configured(self, name: str) -> Limit | None:
        limit_s = self.rules.configured.get(name)
        return None if limit_s is None else Limit(limit_s, "configured")

    def _default(self, kind: Kind) -> Limit:
        match kind:
            case Kind.CHECKPOINT:
                return Limit(self.rules.checkpoint_s, "default")
            case Kind.EVALUATION:
                return Limit(self.rules.evaluation_s, "default")
            case Kind.PLAIN:
                return Limit(self.rules.section_s, "default")
