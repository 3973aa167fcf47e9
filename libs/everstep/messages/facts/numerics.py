"""Results of a training that cannot be right: suspected, judged, acted upon; and determinism."""

from collections.abc import Mapping
from typing import Any

from everstep.messages.base import Count, Int, Name, Part, RoundFact

_SIGNALS: Mapping[str, str] = {
    "nan": "the loss or the gradient norm is not a number",
    "inf": "the loss or the gradient norm is infinite",
    "loss_spike": "the loss left its band",
    "grad_norm_spike": "the gradient norm left its band",
    "output_spike": "the norm of the model's output left its band",
    "replicas_differ": "replicas of the parameters are no longer equal",
    "restored_loss": "the loss does not go on where the checkpoint was saved",
    "results_differ": "a second run of the step gave another result",
}


_ACTS: Mapping[str, tuple[str, str]] = {
    "again": ("made the step again", "make the step again"),
    "rollback": ("went back{step}", "go back{step}"),
    "skip": ("went back{step} and passes over {data}", "go back{step} and pass over {data}"),
    "exclude": ("asked that its node leaves", "ask that its node leaves"),
    "stop": ("stopped", "stop"),
    "move": ("moves to other nodes", "move to other nodes"),
}
"""Each action once it is done, and as it could be done."""


def told_act(act: Mapping[str, Any], judgement: str) -> str:
    """What followed, from the fields of `numerics_acted`; with the reason unless that is known."""
    why = "" if act["reason"] in judgement else f": {act['reason']}"
    if act["action"] == "observe":
        return f"nothing was done{why or ', as the policy is to observe'}"
    done, undone = _ACTS.get(act["action"], (act["action"], act["action"]))
    match act["outcome"]:
        case "done":
            text = f"the training {done}"
        case "observed":
            text = f"the training would {undone}, but the policy is to observe"
        case _:
            text = f"the training could not {undone}"
    step = "" if act["to_step"] is None else f" to step {act['to_step']}"
    data = told_data(act["samples_from"], act["samples_to"])
    return f"{text.replace('{step}', step).replace('{data}', data)}{why}"


def told_data(first: int | None, end: int | None) -> str:
    """Data by their positions: numbers of samples, or of batches of a loader without them."""
    if first is None:
        return "data"
    if end is None:
        return f"data from position {first}"
    return f"data {first}" if end - first < 2 else f"data {first} to {end - 1}"


def told_signal(signal: str) -> str:
    """The signal of an unexpected result in plain words."""
    return _SIGNALS.get(signal, f"its result is unexpected ({signal})")


class NumericsFact(RoundFact, frozen=True, kw_only=True):
    """A fact about one unexpected result; rank 0 reports it after all ranks have agreed."""

    case: Name
    """The id of the unexpected result, equal in all facts about it: 16 hex digits."""
    step: Count
    """The step whose result was unexpected."""
    incident: Name | None = None
    """The incident of the case, where the agent has opened one."""


class NumericsSuspected(NumericsFact, frozen=True, kw_only=True, tag="numerics_suspected.v1"):
    """A result of a step cannot be right; the agent of rank 0 sends this."""

    signal: Name
    """`nan`, `inf`, `loss_spike`, `grad_norm_spike`, `output_spike` (of what the model returned, on
    a rank without a loss), `replicas_differ`, `restored_loss` (it does not go on where the
    checkpoint was saved) or `results_differ` (a second run of the step)."""
    moved_at: Count
    """The step since which the value has moved: checkpoints of this step and later are suspect."""
    rank: Count | None = None
    """The rank with that result, where it is one rank's alone."""
    ranks: tuple[Int, ...] = ()
    """The ranks with that result, at most 100; empty for all."""
    value: float | None = None
    """The value; None where it is not finite. Beyond 1e18 it is sent as 1e18, as are all others."""
    low: float | None = None
    """The lower end of the band in which the value was expected."""
    high: float | None = None
    """The upper end of that band."""

    @property
    def reason(self) -> str:
        """The suspicion in a sentence, with the values."""
        values = ""
        if self.value is not None:
            band = (f"{end:.5g}" for end in (self.low, self.high) if end is not None)
            expected = " to ".join(band)
            values = f": {self.value:.5g}" + (f", expected {expected}" if expected else "")
        ranks = ", ".join(map(str, self.ranks))
        where = f" on {'rank' if len(self.ranks) == 1 else 'ranks'} {ranks}" if ranks else ""
        return f"at step {self.step} {told_signal(self.signal)}{where}{values}"


class NumericsJudged(NumericsFact, frozen=True, kw_only=True, tag="numerics_judged.v1"):
    """The step was run again, or replicas were compared; the agent of rank 0 sends this."""

    signal: Name
    """As in `numerics_suspected`."""
    kind: Name
    """`transient` (it did not come again), `persistent` (it comes again on this rank, not
    elsewhere), `correct_but_unexpected` (it comes everywhere: the data or the optimizer is the
    reason), `not_reproducible_and_not_local` or `replica_differs`."""
    reason: str
    """The judgement in a sentence, with the values."""
    ranks: tuple[Int, ...] = ()
    """The ranks whose result is wrong, at most 100; empty where none could be named."""
    node: Name = ""
    """The node of the first of them."""
    device: Name = ""
    """The accelerator of that rank: `GPU-5e9c…`; empty on a CPU."""
    group: Name = ""
    """The first group of parameters that differs: `layers.7.attention`."""
    first: float | None = None
    """The loss of that rank in the first run; None where it is not finite."""
    again: tuple[float | None, ...] = ()
    """The losses of the further runs on that rank, at most 100."""
    elsewhere: float | None = None
    """The loss of the same step on another rank."""
    elsewhere_by: Count | None = None
    """That other rank; None where it was not run elsewhere."""
    samples_from: Count | None = None
    """The position in the data where the step begins, if that is known: the number of a sample, or
    of a batch of a loader whose samples have no position."""
    samples_to: Count | None = None
    """The position after its last data."""
    moved_from: Count | None = None
    """The round in which these ranks had that result, if they have moved to other nodes since, and
    computed the step again there."""


class NumericsActed(NumericsFact, frozen=True, kw_only=True, tag="numerics_acted.v1"):
    """What followed from the judgement of a result; the agent of rank 0 sends this."""

    action: Name
    """`again` (the step was made again), `rollback`, `skip` (also data are passed over),
    `exclude` (the node leaves), `stop`, `move` (to other nodes) or `observe` (nothing)."""
    outcome: Name
    """`done`, `observed` (the policy is only to observe) or `refused`."""
    reason: str
    """Why."""
    to_step: Count | None = None
    """The step from which the training goes on, in the same round."""
    lost_steps: Count = 0
    """The steps after `to_step` that were made, and do not count any more."""
    samples_from: Count | None = None
    """The position of the first data that are passed over."""
    samples_to: Count | None = None
    """The position after the last one."""


class ComparedResult(Part, frozen=True, kw_only=True):
    """How often a result was the same when its step was run again."""

    name: Name
    """`loss`, `grad_norm`, or a group of parameters."""
    compared: Count
    """How often it was compared."""
    different: Count
    """How often it was not the same, bit for bit."""
    largest: float | None = None
    """The largest relative difference; None for hashes, which have none."""


class NumericsCounted(RoundFact, frozen=True, kw_only=True, tag="numerics_counted.v1"):
    """How often steps were run again, and gave the same; the agent of rank 0 sends this.

    The numbers count from the start of the round. It is sent once a minute, and at the end.
    """

    steps: Count
    """The steps of the round so far."""
    again: Count
    """How many of them were run again."""
    results: tuple[ComparedResult, ...] = ()
    """The compared results, at most 100."""
