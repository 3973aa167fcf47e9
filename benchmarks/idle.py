"""What a job at rest costs: processor time of its agent, of the services, of the bus.

    python -m benchmarks.idle --seconds 30

The training has made one step and sleeps. Next to it stands torchrun at rest with as many ranks.
What the kernel counts has a grain of 10 ms.
"""

import argparse
import os
import time
from pathlib import Path

import psutil

from benchmarks.restarts.contenders import Contender, Everstep, Shape, Training, torchrun
from benchmarks.restarts.options import workplace
from benchmarks.restarts.stage import Stage

TICKS_A_S = os.sysconf("SC_CLK_TCK")
PARTS = {
    "nats-server": "nats-server",
    "agent.ranks.warden": "warden",
    "bootstrap.forge": "forge",
    "bootstrap/__main__.py forge": "forge",
    "everstep_services.cli up": "services (everstep up)",
    "everstep_services.cli run": "agent",
    "torch.distributed.run": "torchrun",
}
"""By a word of the command, the narrower first."""


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--settle", type=float, default=10.0)
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()
    print(f"a job at rest, {asked.ranks} ranks, {asked.seconds:g} s\n")
    print(f"{'':36}{'ms of CPU a second':>20}{'of one core':>13}{'MiB (PSS)':>12}")
    with workplace() as folder:
        for one in (Everstep("warm", with_up=True), torchrun()):
            _measure(folder / one.name, one, asked)


def _measure(folder: Path, contender: Contender, asked: argparse.Namespace) -> None:
    folder.mkdir()
    with Stage(folder) as stage:
        contender.start(stage, Shape(1, asked.ranks), Training(rests=True))
        stage.first_life(90.0)
        time.sleep(asked.settle)
        before = _ticks(stage)
        began = time.monotonic()
        time.sleep(asked.seconds)
        after, took_s = _ticks(stage), time.monotonic() - began
        for pid, (part, ticks) in after.items():
            spent_ms = 1000 * (ticks - before.get(pid, (part, 0))[1]) / TICKS_A_S / took_s
            memory = psutil.Process(pid).memory_full_info().pss / 2**20
            name = f"  {contender.name}: {part}"
            print(f"{name:36}{spent_ms:20.2f}{spent_ms / 10:12.2f}%{memory:12.1f}")


def _ticks(stage: Stage) -> dict[int, tuple[str, int]]:
    """What each process but the ranks has used, itself alone."""
    ranks = {mark.pid for life in stage.marks.lives() for mark in life.marks}
    found = {}
    for pid in sorted(set(stage.pids()) - ranks):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        found[pid] = (_part(pid), int(fields[11]) + int(fields[12]))
    return found


def _part(pid: int) -> str:
    command = " ".join(psutil.Process(pid).cmdline())
    return next((part for word, part in PARTS.items() if word in command), command[:30])


if __name__ == "__main__":
    main()
