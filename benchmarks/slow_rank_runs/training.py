"""One training on some agents of this machine, whose ranks are slowed one after the other."""

import io
import os
import random
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Protocol

import msgspec

from benchmarks.slow_rank_runs.cases import LOSES_S, PLAIN, case_of
from benchmarks.slow_rank_runs.hosts import Host, hogs, hosts, low_priority
from benchmarks.slow_rank_runs.results import Result
from benchmarks.slow_rank_runs.wires import DEVICE
from tests.e2e.cluster import Cluster
from tests.e2e.control_planes import ControlPlane
from tests.waiting import until

_SCRIPT = Path(__file__).with_name("train.py")
_COMPARED_WITHIN_S = 120.0
_USUAL_WINDOWS = 6
"""What is usual for a network is learned from the windows before."""
_FOUND_WITHIN_S = 40.0
_CLEARED_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.05
_HOGS, _HOG_NICE, _LOW_NICE = 8, 5, 19
_CORES_RATIO = 0.9
"""Of the machine's processors, for all hosts together."""
_ENVIRON = {"TORCH_FR_BUFFER_SIZE": "128"}
"""A small ring is read quickly, so that each of these short windows can be compared."""


class Wires(Protocol):
    """A network whose links can be slowed."""

    def host(self, node: str) -> str:
        """A host with that name; its address."""

    def on(self, node: str) -> AbstractContextManager[None]:
        """What is started within runs on that host."""

    def slowed(self, node: str) -> AbstractContextManager[None]:
        """Its link is slow."""


class Training:
    """A job that trains from entering to leaving."""

    def __init__(
        self, folder: Path, plane: ControlPlane, name: str, ranks: int, wires: Wires | None
    ) -> None:
        folder.mkdir()
        self.name, self.ranks, self.case = name, ranks, case_of(name)
        self.cluster = Cluster(folder, folder.name, plane)
        self.hosts: dict[str, Host] = {}
        self._wires = wires
        self._known: set[str] = set()

    def __enter__(self) -> "Training":
        with ExitStack() as stack:
            self._enter_hosts(stack)  # which are empty once all agents have ended
            stack.callback(self.cluster.close)
            for place in range(self.case.nodes):
                self._start(place)
            self._until_compared()
            if self.case.place == "network":
                self._until_windows(_USUAL_WINDOWS)
            started = self.cluster.facts("rank_started")
            self.pids = {body["rank"]: body["pid"] for body in started}
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *failure: object) -> None:
        with self._stack:  # which shows what agents logged: of interest if it failed
            if any(failure):
                return
            (self.cluster.folder / "end").touch()
            self.cluster.until_done()
            leaving = self._stack.pop_all()
        with redirect_stdout(io.StringIO()):
            leaving.close()

    def _enter_hosts(self, stack: ExitStack) -> None:
        case = self.case
        if case.place == "one host":
            self.hosts = stack.enter_context(hosts([self.cluster.job], None))
        elif case.place == "hosts":
            names = [_node(place) for place in range(case.nodes)]
            cores = _CORES_RATIO * (os.cpu_count() or 1) / case.nodes
            self.hosts = stack.enter_context(hosts(names, cores))

    def _start(self, place: int) -> None:
        node, case = _node(place), self.case
        how = "plain" if self.name.startswith(PLAIN) else "sections"
        shape = msgspec.json.encode(case.shape).decode()
        command = (str(_SCRIPT), str(self.cluster.folder), how, shape)
        options = ["--nnodes", str(case.nodes), "--nproc-per-node", str(self.ranks // case.nodes)]
        options += ["--infra-rank", str(place)]
        host = self.hosts.get(node) or next(iter(self.hosts.values()), None)
        within = () if host is None else host.entering
        environ = dict(_ENVIRON)
        with ExitStack() as stack:
            if case.place == "network":
                assert self._wires is not None
                options += ["--address", self._wires.host(node)]
                environ["GLOO_SOCKET_IFNAME"] = DEVICE
                stack.enter_context(self._wires.on(node))
            self.cluster.run(*options, *command, node=node, within=within, **environ)

    # -- what is known of it ----------------------------------------------------------------------

    def table(self) -> dict[str, Any]:
        found: dict[str, Any] = self.cluster.api.get(f"jobs/{self.cluster.job}/stragglers/now")
        return found

    def _until_compared(self) -> None:
        def compared() -> bool:
            known = [one for one in self.table()["ranks"] if one["own_s"] is not None]
            return len(known) == self.ranks

        until(compared, "all ranks are compared", despite=Exception, within_s=_COMPARED_WITHIN_S)

    def _trips(self) -> dict[str, Any]:
        path = f"jobs/{self.cluster.job}/timings"
        shown: dict[str, Any] = self.cluster.api.get(
            path, {"measure": "round_trip", "most_windows": 12}
        )
        return shown

    def _until_windows(self, count: int) -> None:
        def passed() -> bool:
            table = self.table()
            return bool(table["window"] >= first + count * max(1, table["window_steps"]))

        first = self.table()["window"]
        until(passed, f"{count} windows have passed", within_s=_COMPARED_WITHIN_S)

    def _steps(self, rank: int) -> int:
        return int((self.cluster.folder / f"steps-{rank}").read_text() or 0)

    def _found(self) -> list[dict[str, Any]]:
        """Findings of the present run."""
        found = self.cluster.facts("straggler_found")
        return [dict(body) for body in found if body["id"] not in self._known]

    def _open(self) -> list[dict[str, Any]]:
        cleared = {body["finding"] for body in self.cluster.facts("straggler_cleared")}
        return [body for body in self._found() if body["id"] not in cleared]

    # -- runs -------------------------------------------------------------------------------------

    def run(self, seed: int, number: int) -> Result:
        """Slow a rank that is drawn, or its host, until it is named; then heal it."""
        drawn = random.Random(f"{seed} {self.name} {self.ranks} {number}")
        rank = drawn.randrange(self.ranks)
        self._known |= {str(body["id"]) for body in self._found()}
        before, healthy_s = self.table(), self._window_s()
        made = self._steps(rank)
        began = time.monotonic()
        with self._slowed(rank):
            first = self._until(self._found, _FOUND_WITHIN_S)
            seconds, after = time.monotonic() - began, self.table()
        healed = time.monotonic()
        is_cleared = not self._until_none_open()
        if not first and self.case.place == "network":
            self._until_windows(_USUAL_WINDOWS)  # long steps must not become what is usual
        found = self._found()
        steps = max(1, before["window_steps"])
        plain = self.name.startswith(PLAIN)
        return Result(
            kind=self.name,
            ranks=self.ranks,
            seed=seed,
            number=number,
            slowed=self._slow_ranks(rank),
            found=tuple(dict.fromkeys(body["rank"] for body in found)),
            cause=first[0]["cause"] if first else "",
            expected_cause="" if plain else self.case.cause,
            reason=first[0]["reason"][:500] if first else _compared(after, self._trips()),
            windows=max(1, after["window"] // steps - -(-made // steps)) if first else None,
            window_steps=steps,
            window_s=round(healthy_s, 3),
            seconds=round(seconds, 2),
            cleared_s=round(time.monotonic() - healed, 2) if is_cleared else None,
            load=round(os.getloadavg()[0], 1),
        )

    def _window_s(self) -> float:
        table = self.table()
        steps: int = table["window_steps"]
        return float(table["step_s"] or 0.0) * max(1, steps)

    def _slow_ranks(self, rank: int) -> tuple[int, ...]:
        """Those that the fault is about: of a host all."""
        if self.case.kind not in {"host", "link", "delay"}:
            return (rank,)
        each = self.ranks // self.case.nodes
        first = rank // each * each
        return tuple(range(first, first + each))

    @contextmanager
    def _slowed(self, rank: int) -> Iterator[None]:
        node = _node(rank // (self.ranks // self.case.nodes))
        kind = self.case.kind
        if kind in LOSES_S:
            with _file(self.cluster.folder / f"slow-{kind}-{rank}", str(LOSES_S[kind])):
                yield
        elif kind == "nice":
            (host,) = self.hosts.values()
            pid, processor = self.pids[rank], rank % (os.cpu_count() or 1)
            with low_priority(pid, _LOW_NICE, processor), hogs(host, 1, _HOG_NICE, processor):
                yield
        elif kind == "host":
            with hogs(self.hosts[node], _HOGS):
                yield
        else:
            assert self._wires is not None
            with self._wires.slowed(node):
                yield

    def _until(self, look: Any, within_s: float) -> list[dict[str, Any]]:
        deadline = time.monotonic() + within_s
        found: list[dict[str, Any]] = look()
        while not found and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
            found = look()
        return found

    def _until_none_open(self) -> list[dict[str, Any]]:
        """What is open still, once nothing is, or when time is up."""
        deadline = time.monotonic() + _CLEARED_WITHIN_S
        while (left := self._open()) and time.monotonic() < deadline:
            time.sleep(_LOOK_EVERY_S)
        return left


def _compared(table: dict[str, Any], trips: dict[str, Any]) -> str:
    """How ranks compare, and round trips of the latest windows, where nobody was found."""
    ranks = sorted(table["ranks"], key=lambda one: one["rank"])
    ratios = ", ".join(
        "unknown" if one["slower_ratio"] is None else f"{one['slower_ratio']:+.1%}" for one in ranks
    )
    slow = [one["rank"] for one in ranks if one["is_straggler"]]
    shown = {
        row["rank"]: [None if value is None else round(value * 1e3, 1) for value in row["values"]]
        for row in trips["rows"]
    }
    return (
        f"step {table['step_s'] or 0:.3f} s; slow {slow}; own times against the median, by rank: "
        f"{ratios}; clocks within {table['clock_error_s']} s; round trips in ms {shown}"
    )


def _node(place: int) -> str:
    return f"node-{place + 1}"


@contextmanager
def _file(path: Path, text: str) -> Iterator[None]:
    fresh = path.with_name(f"fresh-{path.name}")
    fresh.write_text(text)
    fresh.rename(path)
    try:
        yield
    finally:
        path.unlink()
