"""What is done about a judged step: chosen by the kind of judgement, within a budget."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, assert_never, get_args

from trainer_sdk.checkpoint import arguments
from trainer_sdk.numerics.judgement import Kind, ResultJudgement

Mode = Literal["disabled", "observe", "validate_results", "report_determinism_stats"]
Action = Literal["observe", "again", "rollback", "skip", "exclude", "stop", "move"]
"""`move` is never a user's choice for a kind: it follows from `elsewhere="move"`."""
ACTIONS: Final[tuple[Action, ...]] = ("observe", "again", "rollback", "skip", "exclude", "stop")

Positions = tuple[int, int]
"""Data positions `[from, to)`."""


@dataclass(frozen=True, slots=True)
class NumericsAct:
    """What all ranks do now."""

    action: Action
    before_step: int | None
    """Of `rollback` and `skip`: the checkpoint that is restored has a step below it."""
    span: Positions | None
    """Of `skip`: the data that nobody trains on. Of other actions: the data of the step."""
    reason: str
    refused: Action | None = None
    """The action that cannot be taken, if `action` is `observe` for that reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NumericsPolicy:
    """An action for each kind of judgement, and how many of them a job may take."""

    transient: Action = "observe"
    persistent: Action = "observe"
    unexpected: Action = "observe"
    not_reproducible: Action = "observe"
    replica: Action = "observe"
    refused: Literal["observe", "stop"] = "observe"
    """What is done where an action cannot be taken, or the budget is used up."""
    budget: int = 3
    elsewhere: Literal["report", "move"] = "report"
    """What is done if only another device can tell, and the job has no peer for it."""

    def __post_init__(self) -> None:
        for name, chosen in self.by_kind.items():
            allowed = [action for action in ACTIONS if action != "again" or name == "transient"]
            if chosen not in allowed:
                values = ", ".join(allowed)
                raise ValueError(f"{name} is one of {values}, and is {chosen!r}")
        if self.refused not in ("observe", "stop"):
            raise ValueError(f"refused is observe or stop, and is {self.refused!r}")
        if self.elsewhere not in ("report", "move"):
            raise ValueError(f"elsewhere is report or move, and is {self.elsewhere!r}")
        arguments.whole("budget", self.budget)

    @property
    def by_kind(self) -> dict[str, Action]:
        """The actions, by the name of their argument."""
        names = ("transient", "persistent", "unexpected", "not_reproducible", "replica")
        return {name: getattr(self, name) for name in names}

    def action(self, kind: Kind) -> Action:
        """Return the user's choice for a kind of judgement."""
        match kind:
            case "transient":
                return self.transient
            case "persistent":
                return self.persistent
            case "correct_but_unexpected":
                return self.unexpected
            case "not_reproducible_and_not_local":
                return self.not_reproducible
            case "replica_differs":
                return self.replica
            case _:
                assert_never(kind)

    def decide(
        self,
        judgement: ResultJudgement,
        *,
        moved_at: int,
        span: Positions | None,
        earlier: Sequence[Positions],
        taken: int,
    ) -> NumericsAct:
        """Return what to do.

        `span` is the data since `moved_at`, None if positions are not known; `earlier` the data of
        acts before this one, and `taken` their number, of this job and all its rounds.
        """
        action = self.action(judgement.kind)
        if judgement.is_open and self.elsewhere == "move":
            action = "move"
        if action in ("observe", "again"):
            return NumericsAct(action, None, span, judgement.reason)
        refusal = _refusal(action, judgement, span, earlier)
        if refusal is None and action != "stop" and taken >= self.budget:
            refusal = f"the budget of {self.budget} actions is used up"
        if refusal is not None:
            return NumericsAct("observe", None, span, f"not done ({action}): {refusal}", action)
        before = moved_at if action in ("rollback", "skip") else None
        return NumericsAct(action, before, span, judgement.reason)


def _refusal(
    action: Action,
    judgement: ResultJudgement,
    span: Positions | None,
    earlier: Sequence[Positions],
) -> str | None:
    if action == "exclude" and len(judgement.ranks) != 1:
        return f"ranks {list(judgement.ranks)} are all possible, and one node alone may leave"
    if action == "skip" and span is None:
        return "the batches have no positions, so none can be skipped"
    is_of_data = judgement.kind != "replica_differs"
    if action in ("rollback", "skip") and is_of_data and span is not None:
        for first, last in earlier:
            # A span that only touches an earlier one is the same place: a skip did not help there.
            if span[0] <= last and first <= span[1]:
                return f"samples {first} to {last} were gone back over before"
    return None


def default_policy(mode: Mode) -> dict[str, Action]:
    """Return the actions of a mode that differ from `observe`."""
    if mode not in get_args(Mode):
        raise ValueError(f"mode is one of {', '.join(get_args(Mode))}, and is {mode!r}")
    return {"transient": "again"} if mode == "validate_results" else {}


def policy_of(mode: Mode, **choices: Any) -> NumericsPolicy:
    """Return the policy of these choices; None is the default of the mode."""
    given = {name: choice for name, choice in choices.items() if choice is not None}
    return NumericsPolicy(**{**default_policy(mode), **given})
