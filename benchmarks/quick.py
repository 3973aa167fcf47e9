"""The figures that compare us with others, in short: one table, in about two minutes on two cores.

    python -m benchmarks.quick
    python -m benchmarks.quick --ft-launcher NVRX/bin/ft_launcher --nvrx NVRX/bin/python

Medians of a few turns each, in which ours and the peer alternate; "ratio" is how many times as long
the peer takes. Where the peer is a limit, as a copy of the same bytes, it is at most about 1.
Launches come last, and as many as there is time for. The figures in docs/benchmarks.md are those of
the long forms, in which a person sees the spread.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks import checkpoints, sections
from benchmarks.forming.contenders import Contender, Peer, TooSlowError
from benchmarks.forming.contenders import Everstep as Rendezvous
from benchmarks.restarts.cases import RANK, Outcome, play
from benchmarks.restarts.contenders import Shape, Training
from benchmarks.restarts.options import contenders, parser, rotated, workplace
from benchmarks.restarts.table import US

AGENTS = 8
_MS_OF_NS = 1e-6


@dataclass(frozen=True)
class Figure:
    """One row: milliseconds of ours and of a peer."""

    what: str
    ours: Sequence[float]
    who: str
    peer: Sequence[float]


def main() -> None:
    asked = _asked()
    began, load = time.monotonic(), os.getloadavg()[0]
    measured = (
        *(of_sections(asked), of_rounds(asked), of_saves(asked)),
        of_launches(asked, until=began + asked.seconds),
    )
    show([one for figures in measured for one in figures])
    print(f"{os.cpu_count()} cores, load {load:.1f}; took {time.monotonic() - began:.0f} s")


def _asked() -> argparse.Namespace:
    made = parser(str(__doc__), "2", 5)
    made.set_defaults(contenders=[US, "torchrun"])
    made.add_argument("--nvrx", type=Path, metavar="PYTHON", help="one that has NVRx, as a peer")
    made.add_argument("--mib", type=int, default=256, help="of the state that is saved (256)")
    made.add_argument("--seconds", type=float, default=110.0, help="no launches after these (110)")
    asked = made.parse_args()
    if asked.ft_launcher is not None:
        asked.contenders.append("ft_launcher")
    return asked


def of_sections(asked: argparse.Namespace) -> Iterator[Figure]:
    """What a training pays for each name that it gives."""
    _say("sections")
    pythons = {"everstep": sys.executable, "limit": sys.executable}
    whose = {"limit": "the clock, read twice"}
    if asked.nvrx is not None:
        pythons["nvrx"], whose["nvrx"] = str(asked.nvrx), "NVRx"
    taken = {
        name: [one * _MS_OF_NS for one in sections.run(python, name)["pair"]]
        for name, python in pythons.items()
    }
    for name, who in whose.items():
        yield Figure("a section, entered and left", taken["everstep"], who, taken[name])


def of_rounds(asked: argparse.Namespace) -> Iterator[Figure]:
    """Until the last agent of a new job knows its place."""
    _say("rounds")
    everyone: list[Contender] = [Rendezvous(), Peer(Path(sys.executable), "torch")]
    taken: dict[str, list[float]] = {one.name: [] for one in everyone}
    for turn in range(asked.rounds):
        for one in rotated(everyone, turn):
            try:
                taken[one.name].append(1000 * one.form(AGENTS))
            except TooSlowError as error:
                _say(f"{one.name}: {error}")
    ours, peer = everyone
    what = f"a round of {AGENTS} agents is formed"
    yield Figure(what, taken[ours.name], peer.name, taken[peer.name])


def of_saves(asked: argparse.Namespace) -> Iterator[Figure]:
    """What a training waits for, and for how long its state would be lost."""
    _say("saves")
    ours, peers = "everstep-lazy", {"dcp-async-thread": "dcp.async_save", "dcp": "dcp.save"}
    with tempfile.TemporaryDirectory(prefix="everstep-bench-") as folder:
        taken, back = (
            checkpoints.run(sys.executable, 1, [names, str(asked.mib), str(asked.rounds), folder])
            for names in (",".join([ours, *peers]), "restore")
        )
    mine = checkpoints.of(ours, taken)
    for key, until in (("stall", "the training goes on"), ("durable", "it is durable")):
        for name, who in peers.items():
            theirs = checkpoints.of(name, taken).get(key, [])
            yield Figure(f"{asked.mib} MiB saved, until {until}", mine.get(key, []), who, theirs)
    what = f"{asked.mib} MiB restored from memory"
    yield Figure(what, back.get("restore", []), "a copy of it", back.get("copy", []))


def of_launches(asked: argparse.Namespace, until: float) -> Iterator[Figure]:
    """From the command to the first step, and from the death of a rank to the next one."""
    _say("launches and restarts")
    for ranks in asked.ranks:
        outcomes = _launched(Shape(1, ranks), asked, until)
        peers = [name for name in outcomes if name != US]
        first = {name: [one.launch_ms for one in each] for name, each in outcomes.items()}
        back = {name: [ms for one in each for ms in one.back_ms] for name, each in outcomes.items()}
        for name in peers:
            what = f"{ranks} ranks: from the command to the first step"
            yield Figure(what, first[US], name, first[name])
        for name in peers:
            what = f"{ranks} ranks: from a killed rank to the next step"
            yield Figure(what, back[US], name, back[name])


def _launched(shape: Shape, asked: argparse.Namespace, until: float) -> dict[str, list[Outcome]]:
    """Each as often as there is time for, and once at least; one rank is killed each time."""
    training = Training()
    with workplace() as folder, contenders(asked, folder) as everyone:
        outcomes: dict[str, list[Outcome]] = {one.name: [] for one in everyone}
        for turn in _turns(asked.rounds, until):
            for one in rotated(everyone, turn):
                place = folder / str(turn) / one.name.replace(" ", "-")
                try:
                    outcomes[one.name].append(play(place, one, shape, RANK, training, times=1))
                except TimeoutError as error:
                    _say(f"{one.name}: {error}")
    return outcomes


def _turns(most: int, until: float) -> Iterator[int]:
    began = time.monotonic()
    for turn in range(most):
        now = time.monotonic()
        if turn and now + (now - began) / turn > until:
            return
        yield turn


def _say(what: str) -> None:
    print(f"… {what}", file=sys.stderr, flush=True)


def show(figures: Sequence[Figure]) -> None:
    """Medians, and how many times ours the peer's is."""
    print(f"{'what':52}{'ours':>10}{'peer':>10}{'ratio':>8}{'n':>7}")
    for one in figures:
        ours, peer = (statistics.median(each) if each else None for each in (one.ours, one.peer))
        ratio = "–" if ours is None or peer is None else f"{peer / ours:.3g}"
        times = "/".join(dict.fromkeys([f"{len(one.ours)}", f"{len(one.peer)}"]))
        print(f"{one.what:52}{_shown(ours):>10}{_shown(peer):>10}{ratio:>8}{times:>7}  {one.who}")


def _shown(ms: float | None) -> str:
    if ms is None:
        return "–"
    scale, unit = next(
        (each for each in ((1e-3, "s"), (1.0, "ms"), (1e3, "us")) if ms * each[0] >= 1), (1e6, "ns")
    )
    return f"{ms * scale:.3g} {unit}"


if __name__ == "__main__":
    main()
