"""What the benchmarks of launchers are asked, and where they keep what they start."""

import argparse
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

from benchmarks.restarts.buses import running as running_bus
from benchmarks.restarts.contenders import JOB, Contender, Everstep, Revision, ft_launcher, torchrun

One = TypeVar("One")


def parser(about: str, ranks: str, rounds: int) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=about, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--ranks", type=numbers, default=numbers(ranks), metavar="N,N")
    made.add_argument("--rounds", type=int, default=rounds, help="of all contenders, one by one")
    made.add_argument("--ft-launcher", type=Path, metavar="PATH", help="NVRx's, to be compared too")
    made.add_argument(
        "--ft-options",
        type=shlex.split,
        default=["--ignore-missing-fault-tol-cfg"],
        help="what it needs to run without a file of settings: its name has changed",
    )
    made.add_argument(
        "--against", metavar="REV", help="Everstep at this commit, to be compared too"
    )
    made.add_argument(
        "--buses", type=numbers, default=[], metavar="1,3",
        help="Everstep on buses of that many servers, too, each with TLS and its services",
    )  # fmt: skip
    made.add_argument(
        "--bus", type=Path, metavar="FILE",
        help=f"Everstep on your bus and its services, too: settings with a login of job {JOB}",
    )  # fmt: skip
    made.add_argument("--contenders", type=words, help="only these: `everstep warm,torchrun`")
    return made


def numbers(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def words(text: str) -> list[str]:
    return text.split(",")


@contextmanager
def contenders(
    asked: argparse.Namespace, folder: Path, *more: Contender
) -> Iterator[list[Contender]]:
    """Those that were asked for; what has to be installed and run for them is below `folder`."""
    with ExitStack() as stack:
        buses = [("your bus", asked.bus)] if asked.bus is not None else []
        for servers in asked.buses:
            running = running_bus(folder / f"bus-{servers}", servers, JOB)
            buses.append((f"R{servers}", stack.enter_context(running)))
        yield _chosen(asked, folder, [*more, *(Everstep("warm", bus=bus) for bus in buses)])


def _chosen(asked: argparse.Namespace, folder: Path, more: list[Contender]) -> list[Contender]:
    survivors = Everstep("warm", survives=True)
    found: list[Contender] = [Everstep("warm"), survivors, Everstep("cold"), torchrun(), *more]
    if asked.against is not None:
        other = Revision.installed(asked.against, folder / "against")
        found.insert(1, Everstep("warm", against=other))
    if asked.ft_launcher is not None:
        found.append(ft_launcher(asked.ft_launcher, asked.ft_options))
    if asked.contenders is None:
        return found
    if unknown := set(asked.contenders) - {one.name for one in found}:
        raise SystemExit(f"no contender {sorted(unknown)}: {[one.name for one in found]}")
    return [one for one in found if one.name in asked.contenders]


def rotated(all_of_them: list[One], by: int) -> list[One]:
    """So that nobody is always the first."""
    at = by % len(all_of_them)
    return all_of_them[at:] + all_of_them[:at]


def end_in_order() -> None:
    """At SIGTERM, too, end what was started."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


@contextmanager
def workplace() -> Iterator[Path]:
    """A folder, removed unless something went wrong. An end by SIGTERM leaves nothing either."""
    end_in_order()
    folder = Path(tempfile.mkdtemp(prefix="everstep-restart-"))
    try:
        yield folder
    except BaseException:
        print(f"the output is in {folder}", file=sys.stderr)
        raise
    shutil.rmtree(folder, ignore_errors=True)
