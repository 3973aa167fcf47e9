"""How long a round takes to form: thousands of agents, a real bus, rendezvous as its own process.

    python -m benchmarks.round_forming
    python -m benchmarks.round_forming --buses 1,3 12500
    python -m benchmarks.round_forming --beside --nvrx NVRX/bin/python 8 32 128

Each simulated agent does what a real one does, without ranks: it joins, hears its order, and
reports that its ranks run. They share a few connections, which a real one would not; the messages
are the same, one by one (A2.5).

With `--beside` the others form their first round too, in turns: torch's dynamic rendezvous, and
NVRx's, of each interpreter that has it. The figure is the time until the last agent knows its
place. Their agents are processes, forked from one that has torch, and connected before the clock
starts.
"""

import argparse
import asyncio
import resource
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.forming.contenders import US, Contender, Everstep, Peer, TooSlowError
from benchmarks.forming.crowd import Formed, form, form_on
from benchmarks.restarts.buses import running
from benchmarks.restarts.options import end_in_order, numbers, rotated
from benchmarks.restarts.table import show

SIZES = (256, 1024, 4096, 12_500)
BESIDE = (8, 32, 128, 256)
JOB = "forming"


def main() -> None:
    asked = _asked()
    end_in_order()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 65_536)), hard))
    if asked.beside:
        _beside(asked.sizes or BESIDE, asked)
    elif asked.bus is not None:
        _alone(asked.sizes[:1] or SIZES[:1], lambda nodes: form_on(asked.bus, JOB, nodes))
    elif not asked.buses:
        _alone(asked.sizes or SIZES, form)
    else:
        for servers, nodes in product(asked.buses, asked.sizes or SIZES):
            print(f"\nservers of the bus: {servers}, with TLS")
            with (
                tempfile.TemporaryDirectory() as folder,
                running(Path(folder) / "bus", servers, JOB) as file,
            ):
                _alone([nodes], partial(form_on, file, JOB))


def _asked() -> argparse.Namespace:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("sizes", type=int, nargs="*", metavar="NODES")
    made.add_argument(
        "--buses", type=numbers, default=[], metavar="1,3",
        help="on buses of that many servers, each with TLS and all services",
    )  # fmt: skip
    made.add_argument(
        "--bus", type=Path, metavar="FILE",
        help=f"on your bus and its services: settings with a login of a new job {JOB}; one size",
    )  # fmt: skip
    made.add_argument("--beside", action="store_true", help="torch's and NVRx's, too")
    made.add_argument("--nvrx", type=Path, action="append", default=[], metavar="PYTHON")
    made.add_argument("--rounds", type=int, default=3, help="of all, one by one (3)")
    return made.parse_args()


def _alone(sizes: Sequence[int], formed: Callable[[int], Coroutine[Any, Any, Formed]]) -> None:
    print(
        f"{'nodes':>8}{'joined s':>10}{'formed s':>10}{'running s':>12}"
        f"{'service s':>12}{'agents s':>12}{'messages/node':>16}{'bytes/node':>14}{'peak MiB':>12}"
    )
    for nodes in sizes:
        print(_row(asyncio.run(formed(nodes))), flush=True)


def _row(formed: Formed) -> str:
    return (
        f"{formed.nodes:8}{formed.joined_s:10.2f}{formed.formed_s:10.2f}{formed.running_s:12.2f}"
        f"{formed.service_s:12.2f}{formed.agents_s:12.2f}"
        f"{formed.messages / formed.nodes:16.1f}{formed.size / formed.nodes:14,.0f}"
        f"{formed.peak_mib:12.0f}"
    )


def _beside(sizes: Sequence[int], asked: argparse.Namespace) -> None:
    peers = [Peer(python, "nvrx") for python in asked.nvrx]
    everyone: list[Contender] = [Everstep(), Peer(Path(sys.executable), "torch"), *peers]
    for nodes in sizes:
        took: dict[str, list[float]] = {one.name: [] for one in everyone}
        notes: dict[str, str] = {}
        for turn in range(asked.rounds):
            for one in rotated(everyone, turn):
                try:
                    took[one.name].append(1000 * one.form(nodes))
                except TooSlowError as error:
                    notes[one.name] = str(error)
        print(f"\nuntil the last of {nodes} agents knows its place\n")
        show(took, notes, US)


if __name__ == "__main__":
    main()
