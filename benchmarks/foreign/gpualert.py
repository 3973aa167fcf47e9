"""Logs of failed trainings in 15 classes: Parv-01/gpualert-eval, MIT."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.foreign import Answer, DataSet, Outcome
from everstep_services.attribution.log_analysis.files import analyze_files
from everstep_services.attribution.log_analysis.report import Failure

_PUBLISHED = "macro-F1 0.997"
_BY_RULE = {"host_memory": "ram_oom", "oom_killer": "oom_killer"}
_CLASSES: Mapping[str, str] = {
    "gpu_oom": "cuda_oom", "absurd_size": "ram_oom",
    "collective_timeout": "nccl", "nccl_error": "nccl", "rendezvous": "nccl", "peer_lost": "nccl",
    "collective_mismatch": "nccl", "size_mismatch": "nccl", "nccl_usage": "nccl", "network": "nccl",
    "device_assert": "cuda_runtime", "cuda_error": "cuda_runtime", "cuda_driver": "cuda_runtime",
    "gpu_fault": "cuda_runtime", "gpu_ecc": "cuda_runtime", "nvlink": "cuda_runtime",
    "killed": "oom_killer", "missing_file": "file_not_found", "import_error": "missing_module",
    "nan": "nan_loss", "python_exception": "traceback",
}  # fmt: skip


def score(folder: Path) -> DataSet | None:
    """Analyze each log, and compare the class of its verdict with its label."""
    labels = folder / "gpualert" / "labels.jsonl"
    if not labels.exists():
        return None
    rows = [msgspec.json.decode(line) for line in labels.read_bytes().splitlines() if line]
    scored = DataSet("gpualert", [_answer(labels.parent, row) for row in rows])
    ours = f"macro-F1 {scored.macro_f1():.3f}"
    return DataSet(scored.name, scored.answers, ours, _PUBLISHED)


def class_of(cause: Failure) -> str:
    """The class of a failure by the names of the data set."""
    name = cause.failure_class
    if name == "python_exception" and cause.fingerprint.startswith("observed:RuntimeError:"):
        return "runtime_error"
    return _BY_RULE.get(cause.rule) or _CLASSES.get(name, name)


def _answer(folder: Path, row: Mapping[str, Any]) -> Answer:
    report = analyze_files([folder / row["log"]]).report()
    is_silent = report.verdict != "cause" or report.cause is None
    answer = class_of(report.cause) if report.cause is not None else ""
    outcome: Outcome = "silent" if is_silent else "right" if answer == row["class"] else "wrong"
    confidence = report.confidence if report.verdict == "cause" else None
    detail = f"{answer or report.verdict}: {report.cause.quote[:120] if report.cause else ''}"
    return Answer(row["log"], outcome, confidence, detail, row["class"], answer)
