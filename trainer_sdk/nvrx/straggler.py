"""NVRx's `attribution.straggler`: times of sections and kernels, and scores of ranks.

The sections are also sections of the session, so that `everstep stragglers` shows them. Kernels are
measured all the time, by CUPTI where `cupti-python` is installed; else there are no scores of GPUs.
"""

import enum
import functools
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import fmean, median, median_low, stdev
from typing import Any

import torch

from trainer_sdk.checkpoint.rank_group import RankGroup, group_of_all
from trainer_sdk.environment import environ
from trainer_sdk.kernels import KernelTrace
from trainer_sdk.rank_session import session

RELATIVE, INDIVIDUAL = "relative_perf_scores", "individual_perf_scores"
_KEPT = 8 * 1024
_THRESHOLD = 0.75
_COLLECTIVE = "ncclDev"
_ESTIMATED_BY = 16
"""The number of iterations that estimate how many make up the interval."""
Summaries = Mapping[str, "Mapping[Statistic, float]"]
Scores = dict[str, float | None]


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


@dataclass(frozen=True)
class CallableId:
    """A function to measure: an attribute of an object."""

    obj: object
    name: str
    arg_filter_fn: Callable[..., bool] | None = None
    extra_args_fn: Callable[..., dict[str, Any]] | None = None
    ignored_args: tuple[str, ...] | None = None

    def __str__(self) -> str:
        owner = getattr(self.obj, "__name__", type(self.obj).__name__)
        return f"{owner}.{self.name}"


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


@dataclass
class CustomSection:
    """The latest durations of a section, in ms."""

    name: str
    location: str
    total_entry_cnt: int = 0
    cpu_elapsed_times: "deque[float]" = field(default_factory=lambda: deque(maxlen=_KEPT))


@dataclass
class ReportIntervalTracker:
    """Counts iterations, and finds how many of them make up the interval."""

    time_interval: float = 60.0
    profiling_interval: int = 1
    group: RankGroup = field(default_factory=lambda: RankGroup(None))
    current_iter: int = 0
    iter_interval: int | None = None
    step_times: list[float] = field(default_factory=list)
    _before: float | None = None

    def iter_increase(self, now: float | None = None) -> None:
        """Note the end of an iteration; the sixteenth makes the ranks agree on a number."""
        self.current_iter += 1
        if self.iter_interval is not None:
            return
        now = time.monotonic() if now is None else now
        if self._before is not None:
            self.step_times.append(now - self._before)
        self._before = now
        if len(self.step_times) >= _ESTIMATED_BY:
            typical_ns = max(int(median(self.step_times) * 1e9), 1)
            (slowest_ns,) = self.group.highest([typical_ns])
            wanted = round(self.time_interval * 1e9 / slowest_ns)
            self.iter_interval = max(wanted, self.profiling_interval, 1)

    def is_interval_elapsed(self) -> bool:
        """Whether a report is due after this iteration."""
        return self.iter_interval is not None and self.current_iter % self.iter_interval == 0


class Detector:
    """Measures sections of this process; all calls are of the class."""

    initialized: bool = False
    scores_to_compute: Sequence[str] = (RELATIVE, INDIVIDUAL)
    gather_on_rank0: bool = True
    profiling_interval: int = 1
    report_time_interval: float = 60.0
    custom_sections: dict[str, CustomSection]
    report_interval_tracker: ReportIntervalTracker
    original_callables: list[tuple[CallableId, Any]] | None = None
    _node: str
    _group: RankGroup
    _best: dict[str, float]
    _kernels: KernelTrace | None = None

    def __new__(cls) -> "Detector":
        raise TypeError("Detector has no objects: call Detector.initialize()")

    @classmethod
    def initialize(
        cls,
        scores_to_compute: "Sequence[str] | str" = "all",
        gather_on_rank0: bool = True,
        profiling_interval: int = 1,
        report_time_interval: float = 60,
        node_name: str | None = None,
    ) -> None:
        """Begin; all ranks call it together, after `init_process_group`."""
        if cls.initialized:
            raise RuntimeError("Detector is initialized already: call Detector.shutdown() first")
        wanted = (RELATIVE, INDIVIDUAL) if scores_to_compute == "all" else tuple(scores_to_compute)
        if unknown := set(wanted) - {RELATIVE, INDIVIDUAL}:
            raise ValueError(f"scores_to_compute has {unknown}: it has {RELATIVE}, {INDIVIDUAL}")
        cls.scores_to_compute = wanted
        cls.gather_on_rank0 = gather_on_rank0
        cls.profiling_interval = profiling_interval
        cls.report_time_interval = report_time_interval
        cls.custom_sections, cls._best = {}, {}
        cls._node = node_name or os.uname().nodename
        cls._group = group_of_all(environ.get("WORLD_SIZE", ""))
        cls.report_interval_tracker = ReportIntervalTracker(
            report_time_interval, profiling_interval, cls._group
        )
        cls._kernels = _trace()
        cls.initialized = True

    @classmethod
    def shutdown(cls) -> None:
        """End, and restore wrapped functions."""
        if not cls.initialized:
            return
        cls.restore_original_callables()
        if cls._kernels is not None:
            cls._kernels.stop()
        cls._kernels = None
        cls.initialized = False

    @classmethod
    @contextmanager
    def detection_section(
        cls,
        name: str | None = None,
        profile_cuda: bool = True,  # kernels are measured everywhere
    ) -> Generator[None]:
        """Measure a section; without a name it is the place of the call."""
        del profile_cuda
        if not cls.initialized:
            raise RuntimeError("call Detector.initialize() before detection_section")
        frame = sys._getframe(2)  # noqa: SLF001 - above contextlib's frame
        place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        name = place if name is None else name
        section = cls.custom_sections.setdefault(name, CustomSection(name, place))
        if section.location != place:
            raise ValueError(
                f"section {name!r} is at {section.location} and at {place}: rename one"
            )
        with cls._measured(section):
            yield

    @classmethod
    def wrap_callables(
        cls,
        callable_ids: Iterable[CallableId],
        profile_cuda: bool = True,
    ) -> None:
        """Measure each call of these functions as a section."""
        del profile_cuda
        cls.original_callables = []
        for callable_id in callable_ids:
            original = getattr(callable_id.obj, callable_id.name)
            cls.original_callables.append((callable_id, original))
            setattr(callable_id.obj, callable_id.name, cls._wrapped(original, str(callable_id)))

    @classmethod
    def restore_original_callables(cls) -> None:
        """Undo `wrap_callables`."""
        for callable_id, original in cls.original_callables or ():
            setattr(callable_id.obj, callable_id.name, original)
        cls.original_callables = None

    @classmethod
    def is_interval_elapsed(cls) -> bool:
        """Whether a report is due after this iteration."""
        return cls.report_interval_tracker.is_interval_elapsed()

    @classmethod
    def generate_report_if_interval_elapsed(cls) -> Report | None:
        """Call it in each iteration on all ranks: a report if one is due, else None."""
        cls.report_interval_tracker.iter_increase()
        return cls.generate_report() if cls.is_interval_elapsed() else None

    @classmethod
    def generate_report(cls) -> Report | None:
        """The scores since the last report; all ranks call it together.

        With `gather_on_rank0`, it is None on the other ranks.
        """
        if not cls.initialized:
            raise RuntimeError("call Detector.initialize() before generate_report")
        began = time.monotonic()
        sections = {
            each.name: _summary(list(each.cpu_elapsed_times), median_low, stdev)
            for each in cls.custom_sections.values()
            if each.cpu_elapsed_times
        }
        kernels = {
            each["kernel"]: _kernel_summary(each)
            for each in (cls._kernels.statistics() if cls._kernels is not None else ())
        }
        for each in cls.custom_sections.values():
            each.cpu_elapsed_times.clear()
        return cls._report(sections, kernels, began)

    @classmethod
    def _report(cls, sections: Summaries, kernels: Summaries, began: float) -> Report | None:
        medians = {name: one[Statistic.MED] for name, one in sections.items()}
        own_kernels = {
            name: (one[Statistic.MED], one[Statistic.NUM] * one[Statistic.AVG])
            for name, one in kernels.items()
            if not name.startswith(_COLLECTIVE)
        }
        gathered = cls._group.gather(
            (cls._node, medians, {name: one[0] for name, one in own_kernels.items()}),
            tuple[str, dict[str, float], dict[str, float]],
        )
        relative: Scores = {}
        individual: Scores = {}
        if RELATIVE in cls.scores_to_compute:
            relative = _relative(medians, [each[1] for each in gathered])
            relative[""] = _weighted(own_kernels, _common([each[2] for each in gathered]))
        if INDIVIDUAL in cls.scores_to_compute:
            individual = cls._individual(medians, own_kernels)
        scores = {cls._group.rank: (relative, individual)}
        if cls.gather_on_rank0:
            everybody = cls._group.gather((relative, individual), tuple[Scores, Scores])
            scores = dict(enumerate(everybody))
            if cls._group.rank:
                return None
        nodes = {rank: each[0] for rank, each in enumerate(gathered)}
        relatives = {rank: each[0] for rank, each in scores.items()}
        individuals = {rank: each[1] for rank, each in scores.items()}
        return Report(
            gpu_relative_perf_scores=_of_gpus(relatives),
            section_relative_perf_scores=_of_sections(relatives),
            gpu_individual_perf_scores=_of_gpus(individuals),
            section_individual_perf_scores=_of_sections(individuals),
            rank_to_node=nodes,
            local_section_summaries=sections,
            local_kernel_summaries=kernels,
            generate_report_elapsed_time=time.monotonic() - began,
            gather_on_rank0=cls.gather_on_rank0,
            rank=cls._group.rank,
        )

    @classmethod
    def _individual(
        cls, medians: Mapping[str, float], kernels: Mapping[str, tuple[float, float]]
    ) -> Scores:
        """Against the own lowest medians so far, which are updated first."""
        now = {f"s{name}": took for name, took in medians.items()}
        now |= {f"k{name}": took for name, (took, _) in kernels.items()}
        best = cls._best
        for key, took in now.items():
            best[key] = min(took, best.get(key, took))
        scores: Scores = {name: _ratio(best[f"s{name}"], took) for name, took in medians.items()}
        scores[""] = _weighted(kernels, {name: best[f"k{name}"] for name in kernels})
        return scores

    @classmethod
    @contextmanager
    def _measured(cls, section: CustomSection) -> Generator[None]:
        section.total_entry_cnt += 1
        is_measured = (section.total_entry_cnt - 1) % cls.profiling_interval == 0
        began = time.perf_counter()
        try:
            with session().section(section.name):
                yield
        finally:
            if is_measured:
                section.cpu_elapsed_times.append((time.perf_counter() - began) * 1e3)

    @classmethod
    def _wrapped(cls, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        section = cls.custom_sections.setdefault(name, CustomSection(name, name))

        @functools.wraps(original)
        def measured(*args: Any, **kwargs: Any) -> Any:
            with cls._measured(section):
                return original(*args, **kwargs)

        return measured


def _trace() -> KernelTrace | None:
    if not torch.cuda.is_available():
        return None
    trace = KernelTrace("", every_s=1.0)
    return trace if trace.start() else None


def _summary(
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


def _kernel_summary(figures: Mapping[str, Any]) -> Mapping[Statistic, float]:
    """In us; of the figures that CUPTI's trace keeps."""
    return {
        Statistic.MED: figures["median_s"] * 1e6,
        Statistic.AVG: figures["average_s"] * 1e6,
        Statistic.NUM: float(figures["count"]),
    }


def _ratio(reference: float, own: float) -> float:
    return reference / own if own else 1.0


def _relative(own: Mapping[str, float], all_ranks: Sequence[Mapping[str, float]]) -> Scores:
    """The median of the fastest rank that has the section, over the own one."""
    return {
        name: _ratio(min(each[name] for each in all_ranks if name in each), took)
        for name, took in own.items()
    }


def _common(all_ranks: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The lowest median of each kernel that every rank has run."""
    names = set(all_ranks[0]).intersection(*all_ranks[1:])
    return {name: min(each[name] for each in all_ranks) for name in names}


def _weighted(
    own: Mapping[str, tuple[float, float]], reference: Mapping[str, float]
) -> float | None:
    """The mean of the kernels' scores, by the time that each took; None without a kernel."""
    total = sum(own[name][1] for name in reference)
    if not total:
        return None
    return sum(_ratio(ref, own[name][0]) * own[name][1] for name, ref in reference.items()) / total


def _of_gpus(scores: Mapping[int, Scores]) -> dict[int, float]:
    """The scores of GPUs; NaN where there is no kernel to compare."""
    named = {rank: each[""] for rank, each in scores.items() if "" in each}
    return {rank: math.nan if score is None else score for rank, score in named.items()}


def _of_sections(scores: Mapping[int, Scores]) -> dict[str, dict[int, float]]:
    names = sorted({name for each in scores.values() for name in each} - {""})
    return {
        name: {rank: each[name] or 0.0 for rank, each in scores.items() if name in each}
        for name in names
    }
