"""What `everstep demo` does: facts recorded through two deaths, then counted in REST."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import click
import msgspec

from everstep.bus import BusSettings, connect
from everstep.bus.client import NatsBus
from everstep.bus.errors import BusError
from everstep.bus.roles import SERVICE
from everstep.bus.serverconfig import password_file
from everstep.ids import new_id
from everstep.messages import JobEnded, JobSpec, JobStarted, ProgressMade
from everstep_services.cli.client import Api
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.invocation import Invocation
from everstep_services.cli.output import print_table, wants_color
from everstep_services.cli.state import Running, StateDir

JOB = "demo"
_GROUP = 20
_PAUSE_S = 0.01
_VISIBLE_WITHIN_S = 30.0


@dataclass
class Accident:
    """Something that was killed, and how long the record stood still for it."""

    what: str
    at_fact: int
    meanwhile: int = 0
    back_after_s: float = 0.0

    def row(self) -> dict[str, str]:
        return {
            "killed": self.what,
            "at fact": f"{self.at_fact}",
            "back after": f"{self.back_after_s:.1f} s",
            "recorded meanwhile": f"{self.meanwhile}",
        }


class Cluster:
    """One `everstep up` as a process of its own, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.state = StateDir(folder / "state")
        self._log = folder / "up.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> Running:
        running = self.state.running()
        if running is None:
            raise CliError(f"everstep up is not ready; its log is {self._log}")
        return running

    def start(self) -> float:
        """Seconds until it was ready."""
        began = time.monotonic()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(  # noqa: S603  ourselves
                [sys.executable, "-m", "everstep_services.cli", "up", *self._where()],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        while self.state.running() is None:
            if self._process.poll() is not None:
                raise CliError(f"everstep up failed: {_last_line(self._log)}")
            time.sleep(0.02)
        return time.monotonic() - began

    def _where(self) -> list[str]:
        return ["--state-dir", str(self.state.path), "--api-port", "0"]

    def kill_server(self) -> None:
        os.kill(self.running.bus_pid, signal.SIGKILL)

    def kill_all(self) -> float:
        """Kill it without a word, start it again; seconds until it was ready."""
        assert self._process is not None
        began = time.monotonic()
        self._process.kill()
        self._process.wait()
        self.start()
        return time.monotonic() - began

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            self._process.wait(timeout=30)

    def bus(self) -> BusSettings:
        folder = self.state.path / "nats"
        return BusSettings(
            url=self.running.bus,
            user=SERVICE,
            password_file=password_file(folder, SERVICE),
            reconnect_wait_s=0.2,
            reconnect_jitter_s=0.1,
        )


class Recorder:
    """Records facts of an invented job, and goes on whatever happens to the bus."""

    def __init__(self, bus: NatsBus, total: int) -> None:
        self._bus = bus
        self._total = total
        self.recorded = 0

    async def run(self) -> None:
        await self._bus.record(_started())
        self.recorded = 1
        while self.recorded < self._total - 1:
            group = min(_GROUP, self._total - 1 - self.recorded)
            steps = range(self.recorded, self.recorded + group)
            await asyncio.gather(*(self._bus.record(_progress(step)) for step in steps))
            self.recorded += group
            await asyncio.sleep(_PAUSE_S)
        await self._bus.record(_ended())
        self.recorded += 1

    async def reach(self, count: int) -> None:
        while self.recorded < count:
            await asyncio.sleep(_PAUSE_S)


def demonstrate(invocation: Invocation, total: int) -> int:
    """0 when REST shows every fact once."""
    logging.getLogger("everstep").setLevel(logging.ERROR)  # the accidents are on purpose
    with tempfile.TemporaryDirectory(prefix="everstep-demo-") as name:
        cluster = Cluster(Path(name))
        try:
            ready_s = cluster.start()
            click.echo(f"everstep up was ready in {ready_s:.1f} s: {cluster.running.api}")
            click.echo(f"recording {total} facts of the job {JOB!r}, and killing on the way ...")
            accidents = asyncio.run(_record_through(cluster, Path(name) / "spool", total))
            found, twice = _count(cluster, total)
            print_table(
                [accident.row() for accident in accidents],
                list(accidents[0].row()),
                color=wants_color(invocation),
            )
            return _conclude(cluster, total, found, twice)
        finally:
            cluster.stop()


async def _record_through(cluster: Cluster, spool: Path, total: int) -> list[Accident]:
    server = Accident("nats-server", total // 3)
    everything = Accident("everything: bus, services, API", 2 * total // 3)
    async with (
        connect(cluster.bus(), "demo", spool=spool) as bus,
        asyncio.TaskGroup() as tasks,
    ):
        recorder = Recorder(bus, total)
        recording = tasks.create_task(recorder.run())
        await recorder.reach(server.at_fact)
        await _through(server, recorder, bus, cluster.kill_server)
        await recorder.reach(everything.at_fact)
        await _through(everything, recorder, bus, cluster.kill_all)
        await recording
        await bus.flush(_VISIBLE_WITHIN_S)
    return [server, everything]


async def _through(
    accident: Accident, recorder: Recorder, bus: NatsBus, kill: Callable[[], object]
) -> None:
    before, began = recorder.recorded, time.monotonic()
    await asyncio.to_thread(kill)
    # As a service sees it: the bus is back when something can be written and read back.
    while not await _is_back(bus):
        await asyncio.sleep(_PAUSE_S)
    accident.back_after_s = time.monotonic() - began
    accident.meanwhile = recorder.recorded - before


async def _is_back(bus: NatsBus) -> bool:
    try:
        await bus.prove()
    except BusError:
        return False
    return True


def _count(cluster: Cluster, total: int) -> tuple[int, int]:
    """How many facts of the job REST shows, and how many of them twice."""
    token = cluster.state.token_file.read_text().strip()
    deadline = time.monotonic() + _VISIBLE_WITHIN_S
    with Api(cluster.running.api, token) as api:
        while True:
            ids = [
                fact["id"] for fact in api.pages("facts", {"job": JOB, "limit": 1000}, most=None)
            ]
            if len(ids) >= total or time.monotonic() > deadline:
                return len(set(ids)), len(ids) - len(set(ids))
            time.sleep(0.1)


def _conclude(cluster: Cluster, total: int, found: int, twice: int) -> int:
    token = cluster.state.token_file.read_text().strip()
    with Api(cluster.running.api, token) as api:
        job = api.get(f"jobs/{JOB}")
    click.echo(f"\nGET {cluster.running.api}/api/v1/jobs/{JOB}")
    shown = {key: job.get(key) for key in ("job", "state", "exit_code", "end_reason", "facts")}
    click.echo(msgspec.json.format(msgspec.json.encode(shown), indent=2).decode())
    click.echo(f"\nrecorded {total}, in REST {found}, twice {twice}")
    if found == total and not twice:
        click.echo("Nothing was lost and nothing came twice. Run it yourself: everstep up")
        return Exit.OK
    click.echo(f"{total - found} facts are missing: this is a bug, please report it", err=True)
    return Exit.ERROR


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return lines[-1] if lines else "it said nothing"


def _started() -> JobStarted:
    spec = JobSpec(
        name="an invented job",
        labels={"purpose": "demo"},
        command=("python", "train.py"),
        config_fingerprint="0" * 16,
        nodes_min=1,
        nodes_max=1,
        ranks_per_node=2,
    )
    return JobStarted(
        id=new_id(),
        job=JOB,
        at=datetime.now(UTC),
        source="demo",
        spec=spec,
        world_size=2,
        allocation="demo-1",
    )


def _progress(step: int) -> ProgressMade:
    return ProgressMade(
        id=new_id(), job=JOB, at=datetime.now(UTC), source="demo", round=0, step=step
    )


def _ended() -> JobEnded:
    return JobEnded(
        id=new_id(),
        job=JOB,
        at=datetime.now(UTC),
        source="demo",
        state="done",
        exit_code=0,
        reason="all steps are done",
    )
