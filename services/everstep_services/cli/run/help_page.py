"""The page of `everstep run --help`: examples first, then options by purpose."""

import textwrap
from collections.abc import Sequence
from itertools import groupby

from everstep_services.cli.run.options import (
    BUS,
    GENERAL,
    LOGS,
    NVRX,
    OTHER,
    OWN,
    PLACEMENT,
    RESTARTS,
    RUN,
    STALLS,
    STARTING,
    TORCHRUN,
    WHERE,
    RunOption,
)

USAGE = "[OPTIONS] SCRIPT [ARGUMENTS]..."
EXAMPLES = (
    ("everstep run train.py", "one rank on this machine; nothing else is needed"),
    ("everstep run --nproc-per-node auto train.py --lr 3e-4", "a rank for each GPU"),
    ("everstep run --check --nproc-per-node 8 train.py", "what would run; starts nothing"),
    ("srun everstep run --nnodes 16 --nproc-per-node 8 train.py", "on Slurm, one task a node"),
    (
        "everstep run --job llama --nnodes 4 --spares 1 --nproc-per-node 8 -m my.train",
        "on each of five nodes",
    ),
)
EXIT_CODES = (
    (0, "Done."),
    (1, "Failed, and the restart budget is spent."),
    (2, "The command line or a setting is wrong."),
    (90, "This node cannot go on with it, and the job is not done: requeue it."),
    (91, "Preempted, and no work is lost: requeue the job."),
    (92, "Not enough nodes within --join-timeout."),
    (93, "Do not restart: a person stopped it, or it fails alike again and again."),
    (94, "The control plane could not be reached at the start: requeue the job."),
    ("128+N", "Ended by signal N."),
)
_ORDER = (RUN, WHERE, RESTARTS, STALLS, STARTING, LOGS, PLACEMENT, BUS, OTHER, GENERAL)


def page(width: int) -> str:
    """The page, at most as wide as the terminal."""
    width = max(60, min(width, 100))
    options = sorted(
        (option for option in (*TORCHRUN, *OWN) if option.group and not option.note),
        key=lambda option: _ORDER.index(option.group),
    )
    parts = [
        f"Usage: everstep run {USAGE}\n",
        _filled(
            "Run a training script with one process for each rank, and start it again when a "
            "rank, an agent or a node dies. Takes torchrun's options and PET_* variables with "
            "the same meaning, and those below. What follows SCRIPT belongs to it.",
            width,
        ),
        "Examples:\n" + "".join(f"  {command}\n      {says}\n" for command, says in EXAMPLES),
    ]
    for group, some in groupby(options, key=lambda option: option.group):
        rows = [row for option in some for row in _row(option, width)]
        parts.append("\n".join([f"{group}:", *rows, ""]))
        if group == OTHER:
            idle = ", ".join(option.long for option in TORCHRUN if option.note)
            text = f"Accepted without effect, each with a line that says why: {idle}."
            parts.append(_filled(text, width - 2, "  "))
    parts.append("Exit codes:\n" + "".join(f"  {code!s:<7} {says}\n" for code, says in EXIT_CODES))
    parts.append(
        _filled(
            "Defaults can be set under [agent] in everstep.toml or as EVERSTEP_AGENT__KEY: "
            "`everstep config show agent`. ft_launcher's --ft-* options are taken where they "
            "have a counterpart; each other says why not.",
            width,
        )
    )
    return "\n".join(parts)


def _row(option: RunOption, width: int) -> list[str]:
    names = ", ".join(option.names)
    head = f"  {names} {option.metavar}".rstrip()
    texts = textwrap.wrap(option.help, width - 30, break_on_hyphens=False)
    if len(head) <= 28:
        head = f"{head:<30}{texts.pop(0)}"
    return [head, *(f"{'':30}{text}" for text in texts)]


def _filled(text: str, width: int, indent: str = "") -> str:
    return (
        textwrap.fill(
            text, width, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False
        )
        + "\n"
    )


def is_wanted(words: Sequence[str]) -> bool:
    """Whether the page is asked for: before the script, whose own --help is its affair."""
    takes_value = {
        name for option in (*TORCHRUN, *OWN, *NVRX) if option.kind != "flag"
        for name in option.names
    }  # fmt: skip
    skip = False
    for word in words:
        if skip:
            skip = False
        elif word in {"-h", "--help"}:
            return True
        elif word == "--" or not word.startswith("-"):
            return False
        else:
            skip = word.replace("_", "-") in takes_value
    return False
