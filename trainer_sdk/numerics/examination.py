"""Runs an unexpected step again, here and elsewhere, and gathers what all ranks have computed."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from trainer_sdk.numerics.agreement import (
    LocalView,
    RankAgreement,
    RankPlace,
    SentResult,
    SentResults,
    bits,
    new_case,
    number,
    own_place,
)
from trainer_sdk.numerics.double_check import DoubleCheck, odd_one
from trainer_sdk.numerics.elsewhere import StepPeers, computed_elsewhere, inputs_hash
from trainer_sdk.numerics.judgement import RankResults, ResultJudgement, decided
from trainer_sdk.numerics.present_step import PresentStep
from trainer_sdk.numerics.replay import deviation, loss_of, run_again
from trainer_sdk.numerics.skips import Positions
from trainer_sdk.numerics.snapshot import Snapshot, TrainingParts
from trainer_sdk.numerics.statistics import UnexpectedResult
from trainer_sdk.numerics.unsharded import data_parallel_ranks

ALIKE_MOST: Final = 3
"""More unexpected steps than these in a row are neither run again nor reported."""
_AGAIN = 1
"""How often a step is run again after the first time: the same result twice is deterministic."""


class StepExamination:
    """Runs steps again. All ranks make each call together."""

    def __init__(
        self,
        parts: TrainingParts,
        agreement: RankAgreement,
        replicas: object,
        *,
        keeps_inputs: bool = False,
    ) -> None:
        self._parts = parts
        self._agreement = agreement
        self._replicas = replicas
        self._peers: StepPeers | None = None
        self._keeps_inputs = keeps_inputs
        """Whether the results may be compared with those of another round."""

    @property
    def places(self) -> Sequence[RankPlace]:
        """Where each rank computes."""
        return self._found_peers().places

    @property
    def own_peers(self) -> Sequence[int]:
        """The ranks with the same part of the model as this one."""
        return data_parallel_ranks(self._parts.modules, self._replicas)

    def run(
        self, present: PresentStep, data: Positions | None = None, *, is_counted: bool = False
    ) -> list[RankResults]:
        """Run the step again, and return the results of all ranks; then all is as it was.

        `data` is its position, if that is known. If it is only counted whether results differ, the
        step is run again once, and not elsewhere.
        """
        calls, before = present.calls, present.before
        assert before is not None
        parameters = list(self._parts.parameters())
        after = Snapshot(self._parts, parameters)
        first = present.own.result(loss_of(calls))
        inputs = inputs_hash(self._parts, calls, before, data) if self._keeps_inputs else ""
        again = [run_again(self._parts, calls, before)]
        apart = deviation(
            after.gradients, [parameter.grad for parameter in self._parts.parameters()]
        )
        again += [run_again(self._parts, calls, before) for _ in range(0 if is_counted else _AGAIN)]
        peers = self._found_peers()
        elsewhere = None
        if peers.shift and not is_counted:
            elsewhere = computed_elsewhere(self._parts, calls, before, self._agreement, peers)
        after.put_back()
        sent = SentResults(
            first=SentResult.of(first),
            again=tuple(map(SentResult.of, again)),
            deviation=bits(apart),
            elsewhere=None if elsewhere is None else SentResult.of(elsewhere),
            elsewhere_of=peers.source if peers.shift else 0,
            inputs=inputs,
        )
        return joined_results(self._agreement.ranks.gather(sent, SentResults), peers)

    def told_apart(
        self, present: PresentStep, judgement: ResultJudgement, results: Sequence[RankResults]
    ) -> ResultJudgement:
        """The judgement about one rank of several, if double precision tells; else as it is."""
        assert present.before is not None
        after = Snapshot(self._parts, list(self._parts.parameters()))
        check = DoubleCheck(self._parts.modules)
        with check.recorded():
            run_again(self._parts, present.calls, present.before)
        after.put_back()
        gathered = self._agreement.ranks.gather([*map(bits, check.deviations)], list[int])
        deviations = [[*map(number, words)] for words in gathered]
        odd = {
            odd_one({rank: deviations[rank] for rank in (result.rank, result.elsewhere_by)})
            for result in results
            if result.rank in judgement.ranks and result.elsewhere_by is not None
        }
        named = [rank for rank in judgement.ranks if rank in odd]
        return decided(judgement, named[0], results) if len(named) == 1 else judgement

    def _found_peers(self) -> StepPeers:
        if self._peers is None:
            ranks = self._agreement.ranks
            place = own_place(self.own_peers)
            self._peers = StepPeers(ranks.gather(place, RankPlace), ranks.rank)
        return self._peers


def joined_results(gathered: Sequence[SentResults], peers: StepPeers) -> list[RankResults]:
    """The results of all ranks, each next to what another one computed of its step."""
    # The gradients were reduced over ranks: a difference says nothing about this very rank.
    deviations = [number(sent.deviation) for sent in gathered]
    apart = 0.0 if any(map(math.isnan, deviations)) else max(deviations)
    # Something between the gradients that ranks have seen and their sum was wrong.
    is_unseen = all(sent.first == sent.again[0] for sent in gathered)
    joined = []
    for rank, sent in enumerate(gathered):
        first = sent.first.read()
        again = tuple(result.read() for result in sent.again)
        if again[0].norm is not None and (first.norm is None or is_unseen):
            first = replace(first, norm=again[0].norm * (1 + apart))
        by, elsewhere = next(
            (
                (other, result.elsewhere)
                for other, result in enumerate(gathered)
                if result.elsewhere is not None and result.elsewhere_of == rank
            ),
            (None, None),
        )
        joined.append(
            RankResults(
                rank=rank,
                node=peers.places[rank].node,
                device=peers.places[rank].device,
                first=first,
                again=again,
                elsewhere=None if elsewhere is None else elsewhere.read(),
                elsewhere_by=by,
                replica=peers.replica(rank),
                inputs=sent.inputs,
            )
        )
    return joined


class JudgementNews:
    """Tells a judgement from the same one of the last times."""

    def __init__(self) -> None:
        self._last: tuple[str, tuple[int, ...]] | None = None
        self._times = 0

    def has(self, judgement: ResultJudgement | None) -> bool:
        """Whether there is a judgement, and not the same for some times already."""
        last = None if judgement is None else (judgement.kind, judgement.ranks)
        self._times = self._times + 1 if last == self._last else 1
        self._last = last
        return last is not None and self._times <= ALIKE_MOST


@dataclass(frozen=True, slots=True)
class Sighting:
    """An unexpected result that this rank has seen."""

    step: int
    unexpected: UnexpectedResult


def local_view(step: int, sighting: Sighting | None, calls: int, usual_loss: float) -> LocalView:
    """What this rank tells the others of a step."""
    seen = sighting.unexpected if sighting else None
    return LocalView(
        case=new_case(),
        step=step if sighting is None else sighting.step,
        signal=seen.signal if seen else "",
        value=bits(seen.value) if seen else 0,
        low=bits(seen.low) if seen and seen.low is not None else None,
        high=bits(seen.high) if seen and seen.high is not None else None,
        moved_at=seen.moved_at if seen else 0,
        calls=calls,
        usual_loss=bits(usual_loss),
        is_exact=torch.get_deterministic_debug_mode() > 1,  # 1 only warns
    )


def chosen_result(views: list[LocalView]) -> UnexpectedResult | None:
    """The unexpected result to judge: of the lowest rank, those without a number first."""
    seen = [view for view in views if view.signal]
    if not seen:
        return None
    view = min(seen, key=lambda view: view.signal not in ("nan", "inf"))
    signal: Any = view.signal
    return UnexpectedResult(
        signal,
        number(view.value),
        None if view.low is None else number(view.low),
        None if view.high is None else number(view.high),
        min(view.moved_at for view in seen),
    )
