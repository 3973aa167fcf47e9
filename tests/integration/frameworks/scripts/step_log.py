"""Notes each step of a toy training, and makes the fault that a test asks for.

`FAULT` is `kill@12` or `hang@12`: in the first round, rank 1 does that after step 12. With
`wait@12`, each round goes on after step 12 only at a pace that lets the test act.
"""

import json
import os
import signal
import threading
import time
from pathlib import Path

ROUND = os.environ.get("EVERSTEP_ROUND", "1")
RANK = os.environ.get("RANK", "0")
EVERY = 5
WITHIN_S = 120.0
_SLOW_S = 0.05
_NEVER = threading.Event()


def note_step(folder: Path, step: int) -> None:
    """Note a finished step as a line `ROUND STEP`, and make the fault, if it is due."""
    with (folder / f"steps-{RANK}").open("a") as file:
        file.write(f"{ROUND} {step}\n")
    fault, _, at = os.environ.get("FAULT", "").partition("@")
    if not fault or step < int(at):
        return
    if fault == "wait":
        _NEVER.wait(_SLOW_S)
    elif ROUND == "1" and RANK == "1":
        wait_for_checkpoint(folder, int(at) // EVERY * EVERY)
        if fault == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        import trainer_sdk

        with trainer_sdk.session().section("stuck"):  # other limits hold at the start, too
            _NEVER.wait()


def wait_for_checkpoint(folder: Path, step: int) -> None:
    """Wait until the checkpoint of a step is durable and sealed: steps of a toy are very short."""
    deadline = time.monotonic() + WITHIN_S
    while step not in saved_steps(folder) and time.monotonic() < deadline:
        _NEVER.wait(_SLOW_S)


def saved_steps(folder: Path) -> set[int]:
    """The steps of the sealed or published checkpoints below a folder."""
    published = {int(place.parent.name[-9:]) for place in folder.rglob("step-*/manifest.json")}
    return published | {_step_of(place) for place in folder.rglob("*everstep-seal*")}


def _step_of(seal: Path) -> int:
    try:
        return int(json.loads(seal.read_bytes())["step"])
    except (ValueError, OSError):
        return -1  # it is being written


def damage_newest(folder: Path) -> None:
    """Flip a bit in the largest file of the newest sealed checkpoint of a folder."""
    seals = [*folder.rglob("*everstep-seal*")]
    newest = max(seals, key=_step_of)
    files = [place for place in newest.parent.iterdir() if place.is_file() and place != newest]
    if newest.name.endswith(".everstep-seal"):
        files = [newest.with_name(newest.name.removesuffix(".everstep-seal"))]
    flip(max(files, key=lambda place: place.stat().st_size))


def damage_shard(checkpoint: Path) -> None:
    """Flip a bit in rank 0's shard of a checkpoint."""
    flip(checkpoint / "__0_0.distcp")


def flip(file: Path) -> None:
    """Flip a bit in the middle of a file."""
    octets = bytearray(file.read_bytes())
    octets[len(octets) // 2] ^= 1
    file.write_bytes(octets)
