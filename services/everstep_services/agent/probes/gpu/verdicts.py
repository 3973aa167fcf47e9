"""The results for a GPU, from its present state and the notes of earlier looks; pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from everstep.messages import CheckResult
from everstep_services.agent.probes.base import CheckState, FailureClass
from everstep_services.agent.probes.gpu.snapshot import GpuSnapshot
from everstep_services.agent.probes.settings import ChecksSettings

RECOVERY: Mapping[int, tuple[CheckState, FailureClass, str, str]] = {
    1: ("failed", "reset", "GPU_RESET", "it must be reset"),
    2: ("failed", "reboot", "NODE_REBOOT", "its node must be rebooted"),
    3: ("failed", "drain", "DRAIN_P2P", "traffic to its peers must be drained"),
    4: ("failed", "drain", "DRAIN_AND_RESET", "it must be drained, then reset"),
    5: ("warning", "report", "RECOVER_IMEX_DOMAIN", "its IMEX domain must be recovered"),
    6: ("failed", "reset", "BUS_RESET", "its bus must be reset"),
    7: ("failed", "reboot", "SYSTEM_REBOOT", "its system must be rebooted"),
}
"""What the driver asks for, by its number. 5 concerns other nodes as well as this one."""
_MARGIN_C = 5


def verdicts(
    gpu: GpuSnapshot, before: Mapping[str, Any], settings: ChecksSettings
) -> list[CheckResult]:
    """All troubles of the GPU; one `ok` or `unknown` if there are none."""
    if gpu.gone is not None:
        return [_result(gpu, "failed", gpu.gone.reason, gpu.gone.failure_class)]
    results = [
        *_recovery(gpu),
        *_memory(gpu, before),
        *_clocks(gpu, before, settings),
        *_fabric(gpu),
    ]
    if results:
        return results
    if gpu.unreadable:
        return [_result(gpu, "unknown", f"could not be read: {'; '.join(gpu.unreadable)}")]
    return [_result(gpu, "ok", _remarks(gpu))]


def notes(gpu: GpuSnapshot, before: Mapping[str, Any]) -> dict[str, Any]:
    """The notes for the next look."""
    return {
        "index": gpu.index,
        "uncorrected": _or(_ecc(gpu), before.get("uncorrected")),
        "rows": _or(gpu.rows_remapped, before.get("rows")),
        "slowed": slowed_looks(gpu, before),
    }


def slowed_looks(gpu: GpuSnapshot, before: Mapping[str, Any]) -> int:
    """The number of looks in a row, this one included, that found its clocks held back."""
    return int(before.get("slowed", 0)) + 1 if gpu.slowed_by else 0


def _recovery(gpu: GpuSnapshot) -> Iterator[CheckResult]:
    if not gpu.recovery_action:
        return
    state, failure_class, name, advice = RECOVERY.get(
        gpu.recovery_action,
        (
            "warning",
            "report",
            str(gpu.recovery_action),
            f"recovery action {gpu.recovery_action}, which this release does not know",
        ),
    )
    yield _result(
        gpu, state, f"the driver reports: {advice}", failure_class, f"GPU_RECOVERY_ACTION={name}"
    )


def _memory(gpu: GpuSnapshot, before: Mapping[str, Any]) -> Iterator[CheckResult]:
    if gpu.has_remap_failed:
        yield _result(gpu, "failed", "a broken row of its memory has no spare left", "replace")
    if gpu.is_sram_worn:
        yield _result(
            gpu, "failed", "uncorrectable errors of its SRAM are past NVIDIA's limit", "replace"
        )
    if gpu.recovery_action is None and gpu.uncorrected:
        # An older driver does not say what an error has touched: until a reset clears the
        # counter, the next job may stumble over it.
        yield _result(
            gpu,
            "failed",
            f"{gpu.uncorrected} uncorrectable memory errors since its last reset; reset it",
            "reset",
        )
    elif (more := _more(_ecc(gpu), before.get("uncorrected"))) > 0:
        yield _result(
            gpu,
            "warning",
            f"{more} more uncorrectable memory errors since the last look; the driver has "
            "contained them",
            "watch",
        )
    if gpu.is_remap_pending or gpu.is_retirement_pending:
        yield _result(
            gpu, "warning", "a broken part of its memory is replaced at the next reset", "reset"
        )
    elif (rows := _more(gpu.rows_remapped, before.get("rows"))) > 0:
        yield _result(
            gpu,
            "warning",
            f"{rows} more rows of its memory were replaced, {gpu.rows_remapped} in all",
            "watch",
        )


def _clocks(
    gpu: GpuSnapshot, before: Mapping[str, Any], settings: ChecksSettings
) -> Iterator[CheckResult]:
    looks = slowed_looks(gpu, before)
    if looks:
        has_failed = looks >= settings.persistent_looks
        yield _result(
            gpu,
            "failed" if has_failed else "warning",
            f"slowed down by {' and '.join(gpu.slowed_by)}, {looks} times in a row "
            f"(limit {settings.persistent_looks}){_heat(gpu)}",
            "drain" if has_failed else "watch",
        )
    elif _is_hot(gpu, settings):
        yield _result(gpu, "warning", f"hot{_heat(gpu)}", "watch")


def _is_hot(gpu: GpuSnapshot, settings: ChecksSettings) -> bool:
    limit_c = settings.gpu_temperature_warning_c
    if limit_c is None and gpu.slows_down_at_c:
        limit_c = gpu.slows_down_at_c - _MARGIN_C
    return limit_c is not None and gpu.temperature_c is not None and gpu.temperature_c > limit_c


def _heat(gpu: GpuSnapshot) -> str:
    if gpu.temperature_c is None:
        return ""
    limit = f"; it slows down at {gpu.slows_down_at_c} °C" if gpu.slows_down_at_c else ""
    return f": {gpu.temperature_c} °C{limit}"


def _fabric(gpu: GpuSnapshot) -> Iterator[CheckResult]:
    fabric = gpu.fabric
    if fabric is None:
        return
    if fabric.has_failed:
        yield _result(gpu, "failed", "it could not join its NVLink fabric", "reset")
    elif not fabric.is_joined:
        yield _result(
            gpu,
            "warning",
            "it has not joined its NVLink fabric yet: is nvidia-fabricmanager running?",
            "report",
        )
    if fabric.is_route_bad:
        yield _result(gpu, "failed", "its route through the NVLink fabric is broken", "drain")
    if fabric.is_slow:
        yield _result(gpu, "warning", "its NVLink bandwidth is degraded", "watch")
    if fabric.is_misconfigured:
        yield _result(gpu, "warning", "its NVLink fabric is not configured as it should", "report")


def _remarks(gpu: GpuSnapshot) -> str:
    remarks = []
    if gpu.is_mig:
        remarks.append("MIG is on")
    if gpu.is_persistent is False:
        remarks.append("persistence mode is off: the first process waits for the driver")
    return "; ".join(remarks)


def _ecc(gpu: GpuSnapshot) -> int | None:
    return _or(gpu.uncorrected_ever, gpu.uncorrected)


def _more(now: int | None, before: int | None) -> int:
    return 0 if now is None or before is None else now - before


def _or(first: int | None, second: int | None) -> int | None:
    return second if first is None else first


def _result(
    gpu: GpuSnapshot,
    state: CheckState,
    reason: str,
    failure_class: FailureClass = "",
    code: str = "",
) -> CheckResult:
    return CheckResult(
        check="gpu",
        state=state,
        subject=gpu.uuid,
        reason=f"GPU {gpu.index}: {reason}" if reason else "",
        failure_class=failure_class,
        nvlink_domain="" if gpu.fabric is None else gpu.fabric.domain,
        code=code,
    )
