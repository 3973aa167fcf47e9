"""NVRx's straggler detection for Lightning, over the detector here."""

import logging
import math
import sys
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Any

from trainer_sdk.checkpoint.rank_group import RankGroup, group_of_all
from trainer_sdk.nvrx.straggler import CallableId, Detector
from trainer_sdk.nvrx.straggler_report import Report, StragglerId

if TYPE_CHECKING:
    Callback = object
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback


class StragglerDetectionCallback(Callback):
    """Reports the scores of GPUs, and ends the training if it must, at slow ones."""

    def __init__(  # noqa: PLR0913 - NVRx's arguments
        self,
        report_time_interval: float,
        calc_relative_gpu_perf: bool,
        calc_individual_gpu_perf: bool,
        num_gpu_perf_scores_to_print: int,
        gpu_relative_perf_threshold: float,
        gpu_individual_perf_threshold: float,
        stop_if_detected: bool,
        enable_ptl_logging: bool,
        profiling_interval: int = 1,
        logger_name: str | None = "nemo_logger.StragglerDetectionCallback",
    ) -> None:
        self.report_time_interval = report_time_interval
        self.profiling_interval = profiling_interval
        self.scores = [
            name
            for name, is_wanted in (
                ("relative_perf_scores", calc_relative_gpu_perf),
                ("individual_perf_scores", calc_individual_gpu_perf),
            )
            if is_wanted
        ]
        if not self.scores:
            raise ValueError(
                "give calc_relative_gpu_perf=True or calc_individual_gpu_perf=True: else there is "
                "nothing to report"
            )
        self.num_gpu_perf_scores_to_print = num_gpu_perf_scores_to_print
        self.gpu_relative_perf_threshold = gpu_relative_perf_threshold
        self.gpu_individual_perf_threshold = gpu_individual_perf_threshold
        self.stop_if_detected = stop_if_detected
        self.enable_ptl_logging = enable_ptl_logging
        self._logger = logging.getLogger(logger_name or __name__)
        self._group = RankGroup(None)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Begin, for a training."""
        del pl_module
        if stage != "fit":
            return
        self._group = group_of_all()
        Detector.initialize(
            self.scores,
            gather_on_rank0=True,
            profiling_interval=self.profiling_interval,
            report_time_interval=self.report_time_interval,
        )
        Detector.wrap_callables([CallableId(trainer.strategy, "training_step")])

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """End."""
        del trainer, pl_module, stage
        Detector.shutdown()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any, **kwargs: Any) -> None:
        """Report, if a report is due."""
        del args, kwargs
        report = Detector.generate_report_if_interval_elapsed()
        if not Detector.is_interval_elapsed():
            return
        is_slow = report is not None and self._handle(pl_module, report)
        if self.stop_if_detected and self._group.follow(is_slow, bool):
            self._logger.error("Detected stragglers. Terminating training...")
            self._stop(trainer)

    def _handle(self, pl_module: Any, report: Report) -> bool:
        self._logger.info(
            "Straggler report processing time: %.3f sec.", report.generate_report_elapsed_time
        )
        for kind, scores in (
            ("relative", report.gpu_relative_perf_scores),
            ("individual", report.gpu_individual_perf_scores),
        ):
            comparable = {rank: score for rank, score in scores.items() if not math.isnan(score)}
            if comparable and self.num_gpu_perf_scores_to_print:
                self._print(kind, comparable, report)
            if comparable and self.enable_ptl_logging:
                for name, figure in (("min", min), ("median", median), ("max", max)):
                    metric = f"gpu_{kind}_perf/{name}"
                    pl_module.log(metric, figure(comparable.values()), rank_zero_only=True)
        slow = report.identify_stragglers(
            gpu_rel_threshold=self.gpu_relative_perf_threshold,
            gpu_indiv_threshold=self.gpu_individual_perf_threshold,
        )
        relative, individual = slow["straggler_gpus_relative"], slow["straggler_gpus_individual"]
        if relative:
            self._warn("Some GPUs have worse relative performance", relative)
        if individual:
            self._warn("Some GPUs performance dropped", individual)
        return bool(relative or individual)

    def _print(self, kind: str, scores: Mapping[int, float], report: Report) -> None:
        ordered = [
            f"rank {rank} ({report.rank_to_node.get(rank, '')}): {score:.2f}"
            for rank, score in sorted(scores.items(), key=lambda item: item[1])
        ]
        most = self.num_gpu_perf_scores_to_print
        worst, best = ", ".join(ordered[:most]), ", ".join(ordered[: -most - 1 : -1])
        if len(ordered) <= 2 * most:  # few: each stands once
            worst, best = ", ".join(ordered), ordered[-1]
        self._logger.info("GPU %s performance: worst %s; best %s", kind, worst, best)

    def _warn(self, text: str, slow: set[StragglerId]) -> None:
        ranks = ", ".join(f"{each.rank} ({each.node})" for each in sorted(slow, key=_rank_of))
        self._logger.warning("STRAGGLER DETECTION WARNING: %s. Affected ranks: %s", text, ranks)

    @staticmethod
    def _stop(trainer: Any) -> None:
        """Save a last checkpoint, and exit."""
        for callback in getattr(trainer, "checkpoint_callbacks", ()):
            if getattr(callback, "save_last", None):
                candidates = callback._monitor_candidates(trainer)  # noqa: SLF001 - as NVRx
                callback._save_last_checkpoint(trainer, candidates)  # noqa: SLF001
        finalize = getattr(trainer.strategy.checkpoint_io, "maybe_finalize_save_checkpoint", None)
        if finalize is not None:
            finalize(blocking=True)
        sys.exit(1)


def _rank_of(slow: StragglerId) -> int:
    return slow.rank
