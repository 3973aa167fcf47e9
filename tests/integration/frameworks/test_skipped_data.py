"""Frameworks pass over skipped data: over epochs, with accumulated gradients, after a resume."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler

from trainer_sdk import testing
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.numerics import NumericsPolicy
from trainer_sdk.numerics.rollback import record
from trainer_sdk.numerics.skips import Skips

EPOCH = 11
"""Batches of an epoch, of one sample each."""
Train = Callable[[Path, int], None]


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """As a script that nobody has launched."""
    with testing.watched():
        yield


def skip(folder: Path, *spans: tuple[int, int]) -> None:
    """Write down that the data of these spans are skipped."""
    folder.mkdir(parents=True, exist_ok=True)
    skips = Skips(storage_for(str(folder)), RankGroup(None))
    for number, span in enumerate(spans):
        act = record(f"{number:016x}", "skip", 1, "a test", samples=span)
        assert skips.add(act) == ""


class Toy(torch.nn.Module):
    """Notes the samples it is given."""

    def __init__(self, used: list[int]) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(1, 1)
        self.used = used

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if self.training:
            self.used.extend(int(value) for value in x.flatten())
        return {"loss": (self.linear(x) - labels).square().mean()}


def train_with_hugging_face(folder: Path, steps: int, used: list[int], accumulated: int) -> None:
    transformers = pytest.importorskip("transformers")
    from trainer_sdk.integrations.hugging_face import HuggingFaceCallback, newest_for_all

    class InOrder(transformers.Trainer):  # type: ignore[misc,name-defined]
        def _get_train_sampler(self, train_dataset: Any = None) -> SequentialSampler:
            return SequentialSampler(train_dataset or self.train_dataset)

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_steps=2,
        gradient_accumulation_steps=accumulated,
        per_device_train_batch_size=1,
        learning_rate=1e-5,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    data = [{"x": torch.tensor([float(at)]), "labels": torch.zeros(1)} for at in range(EPOCH)]
    callback = HuggingFaceCallback(numerics=NumericsPolicy())
    trainer = InOrder(model=Toy(used), args=arguments, train_dataset=data, callbacks=[callback])
    trainer.train(resume_from_checkpoint=newest_for_all(folder))
    assert trainer.state.global_step == steps


def train_with_lightning(folder: Path, steps: int, used: list[int], accumulated: int) -> None:
    lightning = pytest.importorskip("lightning.pytorch")
    from trainer_sdk.integrations.lightning import (
        LightningCallback,
        LightningCheckpointIO,
        newest_for_all,
    )

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.toy = Toy(used)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.toy(batch, torch.zeros(1))["loss"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-5)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        accumulate_grad_batches=accumulated,
        callbacks=[
            LightningCallback(numerics=NumericsPolicy(), dirpath=folder),
            lightning.callbacks.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1),
        ],
        plugins=[LightningCheckpointIO()],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data: Any = [torch.tensor([float(at)]) for at in range(EPOCH)]
    trainer.fit(Module(), DataLoader(data, batch_size=1), ckpt_path=newest_for_all(folder))
    assert trainer.global_step == steps


TRAININGS = {"transformers": train_with_hugging_face, "lightning": train_with_lightning}


@pytest.mark.filterwarnings("ignore")  # Lightning warns of itself
@pytest.mark.parametrize("framework", TRAININGS)
@pytest.mark.parametrize("accumulated", [1, 3])
@pytest.mark.parametrize("stops", [(12,), (2, 12), (4, 8, 12)])
def test_skipped_data_are_passed_over_in_each_epoch_and_after_each_resume(
    tmp_path: Path, framework: str, accumulated: int, stops: Sequence[int]
) -> None:
    """The last batch of the first epoch and the first one of the second are among them."""
    steps_of_epoch = -(-EPOCH // accumulated)
    in_steps = [(1, 2), (steps_of_epoch - 1, steps_of_epoch + 2)]
    steps = [
        [number % EPOCH for number in range(epoch * EPOCH, (epoch + 1) * EPOCH)][
            at : at + accumulated
        ]
        for epoch in range(14)
        for at in range(0, EPOCH, accumulated)
    ]
    kept = [
        step
        for number, step in enumerate(steps)
        if not any(first <= number < end for first, end in in_steps)
    ]
    spans = in_steps
    if framework == "lightning":  # counts batches
        spans = [
            (batches_of(first, accumulated), batches_of(end, accumulated))
            for first, end in in_steps
        ]
    skip(tmp_path, *spans)
    used: list[int] = []
    for stop in stops:
        TRAININGS[framework](tmp_path, stop, used, accumulated)
    assert used == [sample for step in kept[: stops[-1]] for sample in step]


def batches_of(step: int, accumulated: int) -> int:
    """How many batches the steps before this one use, without any skipped."""
    steps_of_epoch = -(-EPOCH // accumulated)
    epoch, number = divmod(step, steps_of_epoch)
    return epoch * EPOCH + number * accumulated
