"""Starts a rank, or the forge that ranks are forked from.

    python …/trainer_sdk/bootstrap/__main__.py rank KIND TARGET [ARGUMENT …]
    python …/trainer_sdk/bootstrap/__main__.py forge DESCRIPTOR PADDING

The warden starts it by its path: with `-m`, Python would find a user's `trainer_sdk` folder first.
"""

import sys

if not sys.flags.safe_path:
    del sys.path[
        0
    ]  # this file's folder; a script gets its own folder instead, as from Python itself

import os

from trainer_sdk.bootstrap.rank_setup import set_up_rank
from trainer_sdk.bootstrap.script_runner import run


def _main(role: str, *rest: str) -> None:
    if role == "forge":
        from trainer_sdk.bootstrap.forge import main  # a cold rank does not need it

        born = main(int(rest[0]), os.environ)
        if born is None:
            return
        rest = (born.kind, born.target, *born.arguments)
    kind, target, *arguments = rest
    run(kind, target, arguments, set_up_rank(os.environ), os.environ)


if __name__ == "__main__":
    _main(*sys.argv[1:])
