"""A report of NVRx's straggler detector: the scores of ranks, and how they are computed."""

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

_THRESHOLD = 0.75


class Statistic(enum.Enum):
    """A figure of a section or kernel."""

    MIN = 1
    MAX = 2
    MED = 3
    AVG = 4
    STD = 5
    NUM = 6

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class StragglerId:
    """A rank that is slow, and its node."""

    rank: int
    node: str


Summaries = Mapping[str, Mapping[Statistic, float]]
Scores = dict[str, float | None]


@dataclass(frozen=True)
class Report:
    """Scores from 0 to 1, the best, by rank; with `gather_on_rank0` those of all ranks."""

    gpu_relative_perf_scores: Mapping[int, float]
    section_relative_perf_scores: Mapping[str, Mapping[int, float]]
    gpu_individual_perf_scores: Mapping[int, float]
    section_individual_perf_scores: Mapping[str, Mapping[int, float]]
    rank_to_node: Mapping[int, str]
    local_section_summaries: Mapping[str, Any]
    local_kernel_summaries: Mapping[str, Any]
    generate_report_elapsed_time: float
    gather_on_rank0: bool
    rank: int | None

    def identify_stragglers(
        self,
        gpu_rel_threshold: float = _THRESHOLD,
        section_rel_threshold: float = _THRESHOLD,
        gpu_indiv_threshold: float = _THRESHOLD,
        section_indiv_threshold: float = _THRESHOLD,
    ) -> dict[str, Any]:
        """The ranks with a score below a threshold."""

        def below(scores: Mapping[int, float], threshold: float) -> set[StragglerId]:
            return {
                StragglerId(rank, self.rank_to_node.get(rank, ""))
                for rank, score in scores.items()
                if score < threshold
            }

        def sections(
            scores: Mapping[str, Mapping[int, float]], threshold: float
        ) -> dict[str, set[StragglerId]]:
            slow = {name: below(of_ranks, threshold) for name, of_ranks in scores.items()}
            return {name: ranks for name, ranks in slow.items() if ranks}

        return {
            "straggler_gpus_relative": below(self.gpu_relative_perf_scores, gpu_rel_threshold),
            "straggler_gpus_individual": below(
                self.gpu_individual_perf_scores, gpu_indiv_threshold
            ),
            "straggler_sections_relative": sections(
                self.section_relative_perf_scores, section_rel_threshold
            ),
            "straggler_sections_individual": sections(
                self.section_individual_perf_scores, section_indiv_threshold
            ),
        }


def summary(
    values: Sequence[float],
    middle: Callable[[Sequence[float]], float],
    deviation: Callable[[Sequence[float]], float],
) -> Mapping[Statistic, float]:
    return {
        Statistic.MIN: min(values),
        Statistic.MAX: max(values),
        Statistic.MED: middle(values),
        Statistic.AVG: fmean(values),
        Statistic.STD: deviation(values) if len(values) > 1 else math.nan,
        Statistic.NUM: float(len(values)),
    }


def kernel_summary(figures: Mapping[str, Any]) -> Mapping[Statistic, float]:
    """In us; of the figures that CUPTI's trace keeps."""
    return {
        Statistic.MED: figures["median_s"] * 1e6,
        Statistic.AVG: figures["average_s"] * 1e6,
        Statistic.NUM: float(figures["count"]),
    }


def ratio(reference: float, own: float) -> float:
    return reference / own if own else 1.0


def relative_scores(own: Mapping[str, float], all_ranks: Sequence[Mapping[str, float]]) -> Scores:
    """The median of the fastest rank that has the section, over the own one."""
    return {
        name: ratio(min(each[name] for each in all_ranks if name in each), took)
        for name, took in own.items()
    }


def lowest_medians(all_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The lowest median of each kernel that every rank has run."""
    names = set(all_ranks[0]).intersection(*all_ranks[1:])
    return {name: min(each[name] for each in all_ranks) for name in names}


def weighted_score(
    own: Mapping[str, tuple[float, float]], reference: Mapping[str, float]
) -> float | None:
    """The mean of the kernels' scores, by the time that each took; None without a kernel."""
    total = sum(own[name][1] for name in reference)
    if not total:
        return None
    return sum(ratio(ref, own[name][0]) * own[name][1] for name, ref in reference.items()) / total


def scores_of_gpus(scores: Mapping[int, Scores]) -> dict[int, float]:
    """The scores of GPUs; NaN where there is no kernel to compare."""
    named = {rank: each[""] for rank, each in scores.items() if "" in each}
    return {rank: math.nan if score is None else score for rank, score in named.items()}


def scores_of_sections(scores: Mapping[int, Scores]) -> dict[str, dict[int, float]]:
    names = sorted({name for each in scores.values() for name in each} - {""})
    return {
        name: {rank: each[name] or 0.0 for rank, each in scores.items() if name in each}
        for name in names
    }
