"""torchtitan's checkpoint manager on the CPU: `titan.py FOLDER MODE [keep_memory]`."""

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.integration.frameworks.scripts.step_log import damage_shard
from trainer_sdk.checkpoint.job_context import read_job_context
from trainer_sdk.checkpoint.manifest import IMAGE
from trainer_sdk.integrations.framework_session import FrameworkSession
from trainer_sdk.integrations.torchtitan import TitanCheckpointManager


class Part:
    """A part of a training that has a state: a number."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Stopping(FrameworkSession):
    """A session in which the training must stop."""

    @property
    def should_stop(self) -> bool:
        return True


class Training:
    """A model, a state, and torchtitan's manager for both."""

    def __init__(self, folder: Path, mode: str, *, keep_memory: bool = False) -> None:
        self.model = torch.nn.Linear(3, 1, bias=False)
        torch.nn.init.zeros_(self.model.weight)
        self.state = Part()
        self.manager = TitanCheckpointManager(
            TitanCheckpointManager.Config(
                enable=True,
                interval=5,
                folder="checkpoint",
                async_mode=mode,
                keep_latest_k=0,
                last_save_model_only=False,
                keep_memory=keep_memory,
            ),
            dataloader=Part(),
            model_parts=[self.model],
            optimizers=Part(),
            lr_schedulers=Part(),
            states={"train_state": self.state},
            sd_adapter=None,
            base_folder=str(folder),
        )

    def train(self, steps: int) -> None:
        while self.state.step < steps:
            self.state.step += 1
            torch.nn.init.constant_(self.model.weight, float(self.state.step))
            self.manager.save(self.state.step, last_step=self.state.step == steps)
            self.manager.maybe_wait_for_staging()
        self.manager.maybe_wait_for_saving()

    def load(self) -> int:
        assert self.manager.load()
        assert torch.equal(self.model.weight, torch.full((1, 3), float(self.state.step)))
        return self.state.step


def main(folder: Path, mode: str) -> None:
    training = Training(folder, mode)
    assert not training.manager.load()
    training.train(11)
    again = Training(folder, mode)
    assert again.load() == 11
    damage_shard(folder / "checkpoint" / "step-000000011")
    again = Training(folder, mode)
    assert again.load() == 10
    again.manager._run = Stopping("torchtitan")
    try:
        again.train(20)
    except SystemExit as error:
        assert error.code == 0
    else:
        raise AssertionError("the training has not ended")
    assert again.state.step == 11
    assert Training(folder, mode).load() == 11


def main_with_memory(folder: Path, mode: str) -> None:
    training = Training(folder, mode, keep_memory=True)
    assert not training.manager.load()
    training.train(11)
    saved = folder / "checkpoint"
    shutil.move(saved / "step-000000011", folder)  # as if the training had died before
    again = Training(folder, mode, keep_memory=True)
    assert again.load() == 11
    for image in Path(read_job_context(os.environ).images).glob(f"own/rank-0/*/{IMAGE}"):
        damage_image(image)
    again = Training(folder, mode, keep_memory=True)
    assert again.load() == 10
    assert Training(folder, mode).load() == 10


def damage_image(image: Path) -> None:
    """Flip one bit of an image."""
    with image.open("r+b") as file:
        octet = file.read(1)[0]
        file.seek(0)
        file.write(bytes([octet ^ 1]))


if __name__ == "__main__":
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['EVERSTEP_TEST_STORE']}", rank=0, world_size=1
    )
    run = main_with_memory if "keep_memory" in sys.argv else main
    run(Path(sys.argv[1]), sys.argv[2])
    dist.destroy_process_group()
