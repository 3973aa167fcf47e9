"""The calls of one contender, timed in a process of its own; prints JSON.

python -m benchmarks.sectioning.calls everstep|cpu|nvrx|limit
"""

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from time import monotonic_ns, perf_counter_ns
from types import TracebackType

BATCH = 10
BATCHES = 3000
BATCHES_OF_A_PEER = 100
SECTIONS_A_STEP = 20
BUNDLES = 200
SWEPT_BYTES = 16 << 20

Call = Callable[[], object]


@dataclass(frozen=True)
class Calls:
    """What is timed."""

    pair: Call
    step: Call
    heartbeat: Call


def timed(call: Call, batches: int) -> list[float]:
    """Nanoseconds a call, in a burst: of ten at a time, so that the clock costs little."""
    for _ in range(batches):
        call()
    found = []
    for _ in range(batches):
        began = perf_counter_ns()
        for _ in range(BATCH):
            call()
        found.append((perf_counter_ns() - began) / BATCH)
    return found


def in_steps(calls: Calls) -> list[float]:
    """Nanoseconds for all of a step, when the training has swept the caches in between."""
    swept = bytearray(SWEPT_BYTES)
    found = []
    for _ in range(BUNDLES):
        swept[:] = bytes(SWEPT_BYTES)
        began = perf_counter_ns()
        for _ in range(SECTIONS_A_STEP):
            calls.pair()
        calls.step()
        found.append(float(perf_counter_ns() - began))
    return found


@contextmanager
def everstep(*, is_cpu_timed: bool = False) -> Iterator[Calls]:
    """A session on a real page; what it would send is kept in memory."""
    from trainer_sdk.rank_session import session
    from trainer_sdk.testing import watched

    with watched() as watch:
        run = session()
        watch._page.time_cpu(is_wanted=is_cpu_timed)
        run.step()

        def pair() -> None:
            with run.section("forward"):
                pass

        yield Calls(pair, run.step, run.heartbeat)


@contextmanager
def nvrx() -> Iterator[Calls]:
    """Their client and their monitor, which is another process and answers nothing but "ok"."""
    from nvidia_resiliency_ext.fault_tolerance import FaultToleranceConfig, RankMonitorClient
    from nvidia_resiliency_ext.fault_tolerance.rank_monitor_server import RankMonitorServer

    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("LOCAL_RANK", "0")
    config = FaultToleranceConfig(
        rank_section_timeouts={"forward": 600.0, "step": 600.0},
        rank_out_of_section_timeout=600.0,
        log_level=40,
        enable_nic_monitor=False,
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["FT_RANK_MONITOR_IPC_SOCKET"] = f"{folder}/monitor"
        monitor = RankMonitorServer.run_in_subprocess(config, f"{folder}/monitor")
        client = RankMonitorClient()
        try:
            client.init_workload_monitoring()

            def pair() -> None:
                client.start_section("forward")
                client.end_section("forward")

            def step() -> None:
                client.start_section("step")
                client.end_section("step")

            yield Calls(pair, step, client.send_heartbeat)
            client.shutdown_workload_monitoring()
        finally:
            monitor.terminate()
            monitor.join()


class _TwoReads:
    __slots__ = ()

    def __enter__(self) -> None:
        monotonic_ns()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        monotonic_ns()


@contextmanager
def limit() -> Iterator[Calls]:
    """What no section in Python can be cheaper than: a context manager that reads the clock."""
    empty = _TwoReads()

    def pair() -> None:
        with empty:
            pass

    yield Calls(pair, monotonic_ns, monotonic_ns)


CONTENDERS: dict[str, Callable[[], AbstractContextManager[Calls]]] = {
    "everstep": everstep,
    "cpu": partial(everstep, is_cpu_timed=True),
    "nvrx": nvrx,
    "limit": limit,
}


def main(name: str) -> None:
    batches = BATCHES_OF_A_PEER if name == "nvrx" else BATCHES
    with CONTENDERS[name]() as calls:
        found = {
            "pair": timed(calls.pair, batches),
            "step": timed(calls.step, batches),
            "heartbeat": timed(calls.heartbeat, batches),
            "bundle": in_steps(calls),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
