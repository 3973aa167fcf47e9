"""Results that cannot be right, as REST shows them, and how far results are deterministic."""

from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime

from pydantic import Field

from everstep.messages.facts.numerics import told_act, told_data
from everstep.store.queries import Record
from everstep_services.history.api.dto.answer import Answer, present


class NumericsSuspicion(Answer):
    """The first sign."""

    at: datetime
    reason: str = Field(description="The sign in a sentence, with the values.")
    moved_at: int = Field(description="The step since which the value has moved.")
    rank: int | None
    ranks: list[int] = Field(description="The ranks with that result; empty for all.")
    value: float | None = Field(description="The value; null where it is not finite.")
    low: float | None = Field(description="The lower end of the expected band.")
    high: float | None = Field(description="The upper end of the expected band.")


class NumericsJudgement(Answer):
    """What further runs of the step, or comparisons of replicas, have shown."""

    at: datetime
    reason: str = Field(description="The judgement in a sentence, with the values.")
    ranks: list[int] = Field(description="The ranks whose result is wrong.")
    node: str | None = Field(description="The node of the first of them.")
    device: str | None = Field(description="The accelerator of that rank.")
    group: str | None = Field(description="The first group of parameters that differs.")
    first: float | None = Field(description="The loss of that rank in the first run.")
    again: list[float | None] = Field(description="Its losses in the further runs.")
    elsewhere: float | None = Field(description="The loss of the same step on another rank.")
    elsewhere_by: int | None = Field(description="That other rank.")
    samples_from: int | None = Field(
        description="The position of the step's first data: samples, or batches."
    )
    samples_to: int | None = Field(description="The position after its last data.")


class NumericsAction(Answer):
    """What followed."""

    at: datetime
    action: str = Field(
        description="`again`, `rollback`, `skip`, `exclude`, `stop`, `move` or `observe`.",
        examples=["rollback"],
    )
    outcome: str = Field(description="`done`, `observed` or `refused`.")
    reason: str
    story: str = Field(description="The action in a sentence.")
    to_step: int | None = Field(description="The step from which the training goes on.")
    lost_steps: int = Field(description="The steps after it that do not count any more.")
    samples_from: int | None = Field(
        description="The position of the first skipped data: samples, or batches."
    )
    samples_to: int | None = Field(description="The position after the last one.")


class NumericsCase(Answer):
    """A result that cannot be right: suspected, judged, and acted upon."""

    case: str
    first_n: int = Field(description="The place of its first fact in the log.")
    job: str
    round: int
    step: int = Field(description="The step whose result was unexpected.")
    signal: str | None = Field(
        description="`nan`, `inf`, `loss_spike`, `grad_norm_spike`, `output_spike`, "
        "`replicas_differ`, `restored_loss` or `results_differ`.",
        examples=["loss_spike"],
    )
    kind: str | None = Field(
        description="`transient`, `persistent`, `correct_but_unexpected`, "
        "`not_reproducible_and_not_local` or `replica_differs`; null while nothing was judged.",
        examples=["persistent"],
    )
    incident: str | None
    suspected: NumericsSuspicion | None
    judged: NumericsJudgement | None
    acts: list[NumericsAction] = Field(description="What followed, in order.")
    story: list[str] = Field(description="The case in plain sentences.")


class DeterminismOut(Answer):
    """How often a result was the same when its step was run again in the same round."""

    job: str
    round: int
    name: str = Field(description="`loss`, `grad_norm`, or a group of parameters.")
    steps: int = Field(description="The steps of the round so far.")
    again: int = Field(description="How many of them were run again.")
    compared: int = Field(description="How often this result was compared.")
    different: int = Field(description="How often it was not the same, bit for bit.")
    largest: float | None = Field(description="The largest relative difference; null for hashes.")
    counted_at: datetime


def shown_case(row: Record, acts: Sequence[Record]) -> NumericsCase:
    """A case with what followed, as a client sees it."""
    fields = present(row)
    suspected = judged = None
    if fields["suspected_fact"] is not None:
        suspected = NumericsSuspicion(**_part(fields, "suspected"))
    if fields["judged_fact"] is not None:
        judged = NumericsJudgement(**_part(fields, "judged"))
    reasons = "" if judged is None else judged.reason
    shown = [
        NumericsAction(**(told := present(act)), story=_sentence(told_act(told, reasons)))
        for act in acts
    ]
    return NumericsCase(
        **{**fields, "signal": fields["signal"] or fields["judged_signal"]},
        suspected=suspected, judged=judged, acts=shown,
        story=list(_story(fields["kind"], suspected, judged, shown)),
    )  # fmt: skip


_KINDS: Mapping[str, str] = {
    "transient": "It did not come again",
    "persistent": "It comes again on one device, and not on another",
    "correct_but_unexpected": "It is computed correctly: the data or the optimizer is the reason",
    "not_reproducible_and_not_local": "It is not reproducible, and not of one rank",
    "replica_differs": "Copies of the parameters that must be equal differ",
}


def _story(
    kind: str | None,
    suspected: NumericsSuspicion | None,
    judged: NumericsJudgement | None,
    acts: Sequence[NumericsAction],
) -> Iterator[str]:
    if suspected is not None:
        yield _sentence(suspected.reason)
    if judged is not None:
        more = [judged.reason]
        if judged.group and judged.group not in judged.reason:
            more.append(f"{judged.group} is the first group of parameters that differs")
        if judged.samples_from is not None:
            more.append(f"with {told_data(judged.samples_from, judged.samples_to)}")
        yield f"{_KINDS.get(kind or '', kind)}: {'; '.join(more)}"
    elif not acts:
        yield "It was not judged"
    yield from (act.story for act in acts)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _part(fields: Record, stem: str) -> Record:
    """The fields of one fact of a case: some stand under the stem of that fact."""
    named = {
        name.removeprefix(f"{stem}_"): value
        for name, value in fields.items()
        if name.startswith(f"{stem}_")
    }
    lists = {name: named.get(name) or [] for name in ("ranks", "again")}
    return {**fields, **named, **lists}
