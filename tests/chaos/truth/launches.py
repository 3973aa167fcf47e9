"""Cases whose ranks another launcher starts: Everstep watches them, and ends nothing."""

import os
import signal
from collections.abc import Callable

from tests.chaos.truth.scene import SCRIPT, WITHIN_S, Scene
from tests.e2e.ports import free_port
from tests.e2e.processes import ROOT, python
from tests.e2e.test_attach import TORCHRUN, WRAPPED, Launched, place
from trainer_sdk.nvrx import aliases

LIMITS = "compute=4,data=90,exchange=90,outside=90,first-step=120"


def by_torchrun(scene: Scene) -> None:
    """torchrun. It starts no rank again: gloo's would meet what the last round left behind."""
    options = ("--nproc-per-node", str(scene.case.per_node), "--max-restarts", "0")
    launched = Launched(scene.cluster)
    launched.start(
        *(TORCHRUN, *options, str(SCRIPT), str(scene.folder)), EVERSTEP_AGENT__LIMITS=LIMITS
    )
    scene.others = launched.processes


def in_process(fault: str) -> Callable[[Scene], None]:
    """Ranks that NVRx's wrapper restarts in their processes."""

    def begin(scene: Scene) -> None:
        meeting = {
            "PYTHONPATH": os.pathsep.join([aliases.FOLDER, str(ROOT)]),
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
            "TORCHELASTIC_RESTART_COUNT": "0",
        }  # fmt: skip
        launched = Launched(scene.cluster)
        for rank in range(scene.world):
            command = python(WRAPPED, str(scene.folder), "0", fault)
            launched.start(*command, **{**place(rank, scene.world), **meeting})
        scene.others = launched.processes

    return begin


def over(*codes: int) -> Callable[[Scene], None]:
    """All that was launched ends by itself."""

    def act(scene: Scene) -> None:
        found = [process.wait(WITHIN_S) for process in scene.others]
        assert found == list(codes), f"they ended with {found}"

    return act


def killed(rank: int) -> Callable[[Scene], None]:
    """A rank is killed, and the launcher ends."""

    def act(scene: Scene) -> None:
        scene.until_step()
        os.kill(scene.pid(rank), signal.SIGKILL)
        over(1)(scene)

    return act


def found_hanging(scene: Scene) -> None:
    """It is on record, and nobody ends it."""
    scene.cluster.until_fact("verdict_reached", within_s=WITHIN_S)
    assert [process.poll() for process in scene.others] == [None]
