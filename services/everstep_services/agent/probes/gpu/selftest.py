"""Check `gpu-selftest`: each GPU computes for some seconds, and the results are checked."""

import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec

from everstep.messages import CheckResult
from everstep_services.agent.probes.base import Look, finding
from everstep_services.agent.probes.gpu.exercise import NOTHING_TO_DO

_result = partial(finding, "gpu-selftest")
_SLOW = 0.8
"""A GPU below this share of its siblings' median is slow."""
_HANGS_S = 30.0
"""A GPU whose exercise lasts this long hangs; before, it may be a slow start."""
_EXERCISE = "everstep_services.agent.probes.gpu.exercise"
_ENDS = (0, NOTHING_TO_DO)
_MARGIN_S = 5.0
"""The check gives up this long before its deadline, so that it can report its progress."""


class GpuSelfTestProbe:
    """Only wrong results prove that a GPU must be replaced. Needs torch, and idle GPUs."""

    name = "gpu-selftest"
    about = "each GPU writes, reads and computes for some seconds, and its results are checked"
    beside_training = False

    def __init__(self, devices: Sequence[str] = ()) -> None:
        self._devices = devices

    def examine(self, look: Look) -> Sequence[CheckResult]:
        """One result for each GPU."""
        until_s = max(1.0, look.settings.selftest_within_s - _MARGIN_S)
        command = [sys.executable, "-P", "-m", _EXERCISE]
        arguments = [str(look.settings.selftest_s), *self._devices]
        # it stays in the process group of the examination, and ends with it
        with subprocess.Popen(  # noqa: S603  our own module
            [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as exercise:
            try:
                out, complaints = exercise.communicate(timeout=until_s)
                late_s = None
                trouble = "" if exercise.returncode in _ENDS else _last_line(complaints)
            except subprocess.TimeoutExpired as late:
                exercise.kill()
                out, late_s = late.stdout or b"", until_s
                trouble = f"it did not end within {until_s:g} s"
        return list(verdicts(_lines(out), trouble, late_s))


def verdicts(
    lines: Sequence[dict[str, Any]], trouble: str, late_s: float | None = None
) -> Iterator[CheckResult]:
    """The results that follow from the lines of the exercise.

    `trouble` says why it ended early, `late_s` when it was given up, if it was.
    """
    begun = next((line["began"] for line in lines if "began" in line), None)
    if begun is None:
        missing = next((line["missing"] for line in lines if "missing" in line), "")
        yield _result("", "unsupported" if missing else "unknown", missing or trouble)
        return
    done = [line for line in lines if "device" in line]
    for line in done:
        yield _of_device(line, done)
    for device in begun[len(done) :]:
        at = next((line for line in lines if line.get("at") == device), None)
        if at and late_s is not None and (waited_s := late_s - at["after_s"]) > _HANGS_S:
            yield _result(device, "failed", f"it hangs: no answer for {waited_s:.0f} s", "reset")
        else:
            yield _result(device, "unknown", trouble or "not tested after the error before it")


def _of_device(line: dict[str, Any], all_lines: Sequence[dict[str, Any]]) -> CheckResult:
    device = line["device"]
    if line["wrong"]:
        return _result(device, "failed", line["wrong"], "replace")
    if "error" in line:
        return _result(device, "failed", line["error"], "reset")
    if "full" in line:
        return _result(device, "unknown", f"too little memory is free: {line['full']}")
    text = (
        f"{line['tflops']:.1f} TFLOP/s in bfloat16, {line['gib_s']:.0f} GiB/s, "
        f"{line['tested_mib']} MiB tested"
    )
    for figure in ("tflops", "gib_s"):
        usual = statistics.median(
            other[figure]
            for other in all_lines
            if other["name"] == line["name"] and figure in other
        )
        if line[figure] < _SLOW * usual:
            reason = (
                f"slow compared with other {line['name']}: {line[figure]:.1f}, median {usual:.1f}"
            )
            return _result(device, "warning", f"{reason} ({text})", "watch")
    return _result(device, "ok", text)


def _lines(out: bytes) -> list[dict[str, Any]]:
    results = []
    for line in out.splitlines():
        try:
            results.append(msgspec.json.decode(line, type=dict[str, Any]))
        except msgspec.DecodeError:  # the output of a library, or half a line
            continue
    return results


def _last_line(complaints: bytes) -> str:
    lines = complaints.decode(errors="replace").strip().splitlines()
    return f"it ended early: {lines[-1] if lines else 'without output'}"
