"""NVRx's `attribution.straggler`: times of sections and kernels, and scores of ranks.

The sections are also sections of the session, so that `everstep stragglers` shows them. Kernels are
measured all the time, by CUPTI where `cupti-python` is installed; else there are no scores of GPUs.
"""

import functools
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from statistics import median, median_low, stdev
from typing import Any

import torch

from trainer_sdk.checkpoint.rank_group import RankGroup, group_of_all
from trainer_sdk.device.kernels import KernelTrace
from trainer_sdk.environment import environ
from trainer_sdk.nvrx.straggler_report import (
    Report,
    Scores,
    Statistic,
    Summaries,
    kernel_summary,
    lowest_medians,
    ratio,
    relative_scores,
    scores_of_gpus,
    scores_of_sections,
    summary,
    weighted_score,
)
from trainer_sdk.nvrx.straggler_report import StragglerId as StragglerId
from trainer_sdk.rank_session import session

RELATIVE, INDIVIDUAL = "relative_perf_scores", "individual_perf_scores"
_KEPT = 8 * 1024
_COLLECTIVE = "ncclDev"
_ESTIMATED_BY = 16
"""The number of iterations that estimate how many make up the interval."""


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
    def wrap_callables(cls, callable_ids: Iterable[CallableId], profile_cuda: bool = True) -> None:
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
            each.name: summary(list(each.cpu_elapsed_times), median_low, stdev)
            for each in cls.custom_sections.values()
            if each.cpu_elapsed_times
        }
        kernels = {
            each["kernel"]: kernel_summary(each)
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
            relative = relative_scores(medians, [each[1] for each in gathered])
            relative[""] = weighted_score(
                own_kernels, lowest_medians([each[2] for each in gathered])
            )
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
            gpu_relative_perf_scores=scores_of_gpus(relatives),
            section_relative_perf_scores=scores_of_sections(relatives),
            gpu_individual_perf_scores=scores_of_gpus(individuals),
            section_individual_perf_scores=scores_of_sections(individuals),
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
        scores: Scores = {name: ratio(best[f"s{name}"], took) for name, took in medians.items()}
        scores[""] = weighted_score(kernels, {name: best[f"k{name}"] for name in kernels})
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
