"""Two nodes add numbers over gloo or NCCL, as ranks do: the way on which a training would go.

    python -m everstep_services.agent.probes.network.collectives RANK HOST PORT BACKEND SECONDS

The program is one end, and prints one line of JSON. Only it imports torch.
"""

import asyncio
import json
import sys
import time
from datetime import timedelta
from typing import Any

from everstep.messages.facts.health import CheckResult
from everstep_services.agent.probes.network.pair_test import NAME, Address
from everstep_services.agent.probes.settings import ChecksSettings

BACKENDS = ("gloo", "nccl")
_ELEMENTS = {"gloo": 4 << 20, "nccl": 64 << 20}
_TIMES = 5


async def compare(
    to: Address, backend: str, settings: ChecksSettings, within_s: float, *, is_peer: bool
) -> CheckResult:
    """Be one end, in a process of its own; the two meet where the listener has listened."""
    arguments = (str(int(is_peer)), to.host, str(to.port), backend, str(within_s))
    program = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", __name__, *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        async with asyncio.timeout(within_s):
            out, complaints = await program.communicate()
    except TimeoutError:
        return _result(to, "unknown", f"{backend}: the ends did not finish within {within_s:g} s")
    finally:
        if program.returncode is None:
            program.kill()
            await program.wait()
    if program.returncode:
        last = (complaints.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        return _result(to, "unknown", f"{backend}: {last}")
    return judge(to, backend, json.loads(out.splitlines()[-1]), settings)


def judge(
    to: Address, backend: str, figures: dict[str, Any], settings: ChecksSettings
) -> CheckResult:
    """A wrong sum is a failure; so is a speed below `network_least_mib_s`."""
    if figures.get("wrong"):
        return _result(to, "failed", f"{backend}: {figures['wrong']}")
    text = f"{backend}: sums are right, {figures['mib_s']:.0f} MiB/s"
    if figures["mib_s"] < settings.network_least_mib_s:
        return _result(to, "failed", f"{text} (least {settings.network_least_mib_s:g} MiB/s)")
    return _result(to, "ok", text)


def _result(to: Address, state: Any, reason: str) -> CheckResult:
    failure_class = "watch" if state == "failed" else ""
    return CheckResult(
        check=NAME, state=state, subject=str(to), reason=reason, failure_class=failure_class
    )


def end(rank: int, host: str, port: int, backend: str, within_s: float) -> dict[str, Any]:
    """Add tensors of both ends, and look at each element of the last sum."""
    import torch
    import torch.distributed as dist

    device = torch.device("cuda:0" if backend == "nccl" else "cpu")
    dist.init_process_group(
        backend, init_method=f"tcp://{host}:{port}", rank=rank, world_size=2,
        timeout=timedelta(seconds=within_s),
    )  # fmt: skip
    values = torch.arange(_ELEMENTS[backend], device=device, dtype=torch.int32) % 1000
    sums, took_s = values, []
    for _ in range(_TIMES):
        sums = values + rank
        dist.barrier()
        began = time.monotonic()
        dist.all_reduce(sums)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took_s.append(time.monotonic() - began)
    wrong = int((sums != 2 * values + 1).sum())
    dist.destroy_process_group()
    mib = sums.numel() * sums.element_size() / (1 << 20)
    return {
        "mib_s": mib / min(took_s),
        "wrong": f"{wrong} of {sums.numel()} sums are wrong" if wrong else "",
    }


if __name__ == "__main__":
    rank, host, port, backend, within_s = sys.argv[1:]
    figures = end(int(rank), host, int(port), backend, float(within_s))
    sys.stdout.write(json.dumps(figures) + "\n")
