"""Two nodes add numbers over gloo or NCCL, as ranks do: the way on which a training would go.

    python -m everstep_services.agent.probes.network.collectives NUMBER

The program is one end of pairs, on the GPU with that number, if any. Each line that it reads is a
pair in JSON, and it answers with a line of JSON. Only it imports torch.
"""

import asyncio
import ctypes
import json
import os
import signal
import sys
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Any

from everstep.messages.facts.health import CheckResult
from everstep_services.agent.probes.network.pair_test import NAME, Address
from everstep_services.agent.probes.settings import ChecksSettings

_ELEMENTS = {"gloo": 4 << 20, "nccl": 64 << 20}
_TIMES = 5
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class Sums:
    """What came of the sums of a pair."""

    mib_s: float = 0.0
    """0 if they failed, or if one is wrong."""
    backend: str = ""
    wrong: str = ""
    trouble: str = ""
    """Why there are none."""


@dataclass(frozen=True, slots=True)
class Pair:
    """What an end must know of its pair."""

    rank: int
    """0 for the end at whose address the two meet."""
    host: str
    port: int
    backend: str
    """Empty for the one that ranks would use."""
    within_s: float
    met_within_s: float
    """How long they may take once they have met: an end that fails does not hold the other one for
    longer."""


class PairEnd:
    """A process that is one end of pairs, one after the other; torch is imported once."""

    def __init__(self, number: int = 0) -> None:
        self._number = number
        self._program: Process | None = None

    async def start(self) -> Process:
        """Start the process, unless it runs: it imports torch meanwhile."""
        if self._program is None or self._program.returncode is not None:
            self._program = await asyncio.create_subprocess_exec(
                sys.executable, "-P", "-m", __name__, str(self._number),
                stdin=PIPE, stdout=PIPE, stderr=DEVNULL,
            )  # fmt: skip
        return self._program

    async def add(self, pair: Pair) -> Sums:
        """Add numbers with the other end; each GPU has a port from that of the pair on."""
        pair = replace(pair, port=pair.port + self._number)
        try:
            async with asyncio.timeout(pair.within_s):
                program = await self.start()
                assert program.stdin is not None
                assert program.stdout is not None
                program.stdin.write(f"{json.dumps(asdict(pair))}\n".encode())
                answer = await program.stdout.readline()
                if not answer:
                    code = await program.wait()
                    return Sums(trouble=f"the process that adds numbers ended with code {code}")
                sums = Sums(**json.loads(answer))
        except TimeoutError:
            sums = Sums(trouble=f"the ends did not finish within {pair.within_s:g} s")
        if sums.trouble:
            await self.stop()  # it may hang, or keep a part of the group
        return sums

    async def stop(self) -> None:
        """Kill the process. Safe to repeat."""
        if self._program is not None and self._program.returncode is None:
            self._program.kill()
            await self._program.wait()


async def compare(
    to: Address, backend: str, settings: ChecksSettings, within_s: float, *, is_peer: bool
) -> CheckResult:
    """Be one end of one pair."""
    end = PairEnd()
    try:
        pair = Pair(int(is_peer), to.host, to.port, backend, within_s, within_s)
        sums = await end.add(pair)
        return judge(to, backend, sums, settings)
    finally:
        await end.stop()


def judge(to: Address, backend: str, sums: Sums, settings: ChecksSettings) -> CheckResult:
    """A wrong sum is a failure; so is a speed below `network_least_mib_s`."""
    if sums.trouble:
        return _result(to, "unknown", f"{backend}: {sums.trouble}")
    if sums.wrong:
        return _result(to, "failed", f"{backend}: {sums.wrong}")
    text = f"{backend}: sums are right, {sums.mib_s:.0f} MiB/s"
    if sums.mib_s < settings.network_least_mib_s:
        return _result(to, "failed", f"{text} (least {settings.network_least_mib_s:g} MiB/s)")
    return _result(to, "ok", text)


def _result(to: Address, state: Any, reason: str) -> CheckResult:
    failure_class = "watch" if state == "failed" else ""
    return CheckResult(
        check=NAME, state=state, subject=str(to), reason=reason, failure_class=failure_class
    )


def add_with_other_end(number: int, pair: Pair) -> Sums:
    """Add tensors of both ends, and look at each element of the last sum."""
    import torch
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

    rank, within_s = pair.rank, pair.within_s
    own = pair.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    on_gpu = own == "nccl"
    store = TCPStore(
        pair.host, pair.port, 2, is_master=rank == 0, timeout=timedelta(seconds=within_s)
    )
    other = _other_backend(store, rank, own)
    if own != other:
        return Sums(trouble=f"this node would use {own}, and the other one {other}")
    device = torch.device(f"cuda:{number % max(torch.cuda.device_count(), 1)}" if on_gpu else "cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group(
        own, store=PrefixStore("pair", store), rank=rank, world_size=2,
        timeout=timedelta(seconds=min(within_s, pair.met_within_s)),
    )  # fmt: skip
    values = torch.arange(_ELEMENTS[own], device=device, dtype=torch.int32) % 1000
    sums, took_s = values, []
    for _ in range(_TIMES):
        sums = values + rank
        dist.barrier()
        began = time.monotonic()
        dist.all_reduce(sums)
        if on_gpu:
            torch.cuda.synchronize(device)
        took_s.append(time.monotonic() - began)
    wrong = int((sums != 2 * values + 1).sum())
    dist.destroy_process_group()
    mib = sums.numel() * sums.element_size() / (1 << 20)
    if wrong:
        return Sums(0.0, own, wrong=f"{wrong} of {sums.numel()} sums are wrong")
    return Sums(mib / min(took_s), own)


def _other_backend(store: Any, rank: int, own: str) -> str:
    store.set(f"backend {rank}", own)
    other = store.get(f"backend {1 - rank}").decode()
    if rank:
        store.set("seen", "")
    else:  # the store ends with this process
        store.wait(["seen"])
    return str(other)


def _in_a_line(error: Exception) -> str:
    """NCCL's own words follow after torch's."""
    text = str(error).rpartition("Last error:")[2].strip() or type(error).__name__
    return text.splitlines()[0][:300]


def main(number: int) -> None:
    """Be one end of each pair that is asked for."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))  # also while it waits in torch
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # NCCL prints there, too
    trouble = ""
    try:
        import torch.distributed  # noqa: F401  before the first pair is known
    except Exception as error:  # noqa: BLE001  whatever it is, it is the answer
        trouble = f"torch cannot be imported: {error}"
    for line in sys.stdin:
        try:
            sums = (
                Sums(trouble=trouble)
                if trouble
                else add_with_other_end(number, Pair(**json.loads(line)))
            )
        except Exception as error:  # noqa: BLE001  likewise
            sums = Sums(trouble=_in_a_line(error))
        answers.write(json.dumps(asdict(sums)) + "\n")
        answers.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
