"""Check `gpu`: whether all GPUs are there, and what the driver reports about each."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from everstep.messages import CheckResult
from everstep_services.agent.probes.base import Look
from everstep_services.agent.probes.gpu import snapshot
from everstep_services.agent.probes.gpu.nvml import Load, Nvml, NvmlAwayError, load, opened
from everstep_services.agent.probes.gpu.snapshot import GpuSnapshot
from everstep_services.agent.probes.gpu.verdicts import notes, verdicts


class GpuProbe:
    """NVML's view of each GPU. A feature that a card or driver lacks never fails."""

    name = "gpu"
    about = "GPUs by NVML: recovery action, memory errors, heat, fabric, memory of other jobs"
    beside_training = True

    def __init__(self, load: Load = load) -> None:
        self._load = load

    def examine(self, look: Look) -> Sequence[CheckResult]:
        """One result for each trouble, or one for each GPU without any."""
        try:
            with opened(self._load) as nvml:
                gpus = _read(nvml)
        except NvmlAwayError as away:
            return [_away(look, away)]
        earlier: dict[str, Any] = look.memory.get("gpus", {})
        results = [
            result
            for gpu in gpus
            for result in verdicts(gpu, earlier.get(gpu.uuid, {}), look.settings)
        ]
        results += [*_missing(look, gpus), *_strangers(look, gpus)]
        _remember(look, gpus)
        if not results:
            return [CheckResult(check="gpu", state="unsupported", reason="no NVIDIA GPU")]
        return results


def _read(nvml: Nvml) -> list[GpuSnapshot]:
    count = nvml.ask("nvmlDeviceGetCount")
    if count is None:
        reason = "; ".join(nvml.take_unreadable()) or "no answer"
        raise NvmlAwayError("unknown", f"NVML could not count the GPUs: {reason}")
    return [snapshot.read(nvml, index) for index in range(count)]


def _away(look: Look, away: NvmlAwayError) -> CheckResult:
    expected = look.settings.gpus_expected
    if away.state == "unsupported" and expected:
        reason = f"{expected} GPUs are expected (gpus_expected), and none can be seen: {away}"
        return CheckResult(check="gpu", state="unknown", reason=reason)
    return away.result("gpu")


def _missing(look: Look, gpus: Sequence[GpuSnapshot]) -> Iterator[CheckResult]:
    """GPUs that should be there and are not."""
    expected = look.settings.gpus_expected
    if expected is not None:
        if len(gpus) < expected:
            reason = f"{len(gpus)} of {expected} GPUs are present (gpus_expected); reboot the node"
            yield CheckResult(check="gpu", state="failed", reason=reason, failure_class="reboot")
        return
    if look.memory.get("view") != _view(look):
        return
    here = {gpu.uuid for gpu in gpus}
    nameless = {gpu.index for gpu in gpus if gpu.gone is not None}
    for uuid, noted in look.memory.get("gpus", {}).items():
        if uuid not in here and noted["index"] not in nameless:
            yield CheckResult(
                check="gpu",
                state="failed",
                subject=uuid,
                reason=f"GPU {noted['index']}: it was present before, and is gone; reboot the node",
                failure_class="reboot",
            )


def _remember(look: Look, gpus: Sequence[GpuSnapshot]) -> None:
    view = _view(look)
    before = look.memory.get("gpus", {})
    # a GPU that this view of the node has once seen stays noted: if lost, it is lost at each look
    kept = dict(before) if look.memory.get("view") == view else {}
    for gpu in gpus:
        if gpu.gone is None:
            kept[gpu.uuid] = notes(gpu, before.get(gpu.uuid, {}))
    look.memory["view"] = view
    look.memory["gpus"] = kept


def _view(look: Look) -> str:
    """The identity of this view of the GPUs: the boot, the container, the allocation.

    Two allocations on one node may be given different GPUs; none of them is lost.
    """
    parts = [
        _text(look.path("proc/sys/kernel/random/boot_id")),
        _text(look.path("proc/self/cgroup")),
    ]
    with suppress(OSError):
        parts.append(str(look.path("proc/self/ns/mnt").readlink()))
    return " ".join(parts)


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _strangers(look: Look, gpus: Sequence[GpuSnapshot]) -> Iterator[CheckResult]:
    """Memory held by processes of others.

    In a pid namespace of our own, NVML may show pids that mean nothing here. So while ranks of
    ours run, strangers are named only if one of those ranks is among the holders.
    """
    holders = [(gpu, holder) for gpu in gpus for holder in gpu.holders]
    if look.own_pids and not any(holder.pid in look.own_pids for _, holder in holders):
        return
    for gpu in gpus:
        strange = [holder for holder in gpu.holders if holder.pid not in look.own_pids]
        mib = sum(holder.mib or 0 for holder in strange)
        if mib <= look.settings.gpu_stranger_mib:
            continue
        who = ", ".join(
            f"process {holder.pid}" if holder.pid else "a process of another container"
            for holder in strange
        )
        reason = (
            f"GPU {gpu.index}: {who} holds {mib} MiB (limit {look.settings.gpu_stranger_mib} MiB); "
            "end it, or let its job finish"
        )
        yield CheckResult(
            check="gpu", state="warning", subject=gpu.uuid, reason=reason, failure_class="report"
        )
