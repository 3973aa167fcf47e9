"""NVRx's callbacks in a real training of Lightning, on the CPU."""

import json
import logging
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer_sdk.testing import Watch, watched
from trainer_sdk.wire import Requested

pl: Any = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")

from trainer_sdk.nvrx import WorkloadAction, WorkloadControlRequest  # noqa: E402
from trainer_sdk.nvrx.local_checkpoints import LocalCheckpointManager  # noqa: E402
from trainer_sdk.nvrx.ptl_checkpoints import HierarchicalCheckpointIO, LocalCheckpointCallback  # noqa: E402
from trainer_sdk.nvrx.ptl_resiliency import (  # noqa: E402
    FaultToleranceCallback,
    FaultToleranceSectionsCallback,
    SimulatedFaultParams,
    StragglerDetectionCallback,
)
from trainer_sdk.nvrx.tensor_state import BasicTensorAwareStateDict  # noqa: E402

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]
BATCHES = 20


class Model(pl.LightningModule):  # type: ignore[misc]
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.fails = fails

    def training_step(self, batch: Any, number: int) -> Any:
        if self.fails and number == 3:
            raise ValueError("bad batch")
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, number: int) -> Any:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class IO(HierarchicalCheckpointIO):
    def to_tensor_aware_state_dict(self, checkpoint: dict[str, Any]) -> Any:
        return BasicTensorAwareStateDict(checkpoint)

    def from_tensor_aware_state_dict(self, tensor_aware_checkpoint: Any, **_: Any) -> Any:
        return tensor_aware_checkpoint.to_state_dict()


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Watch]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with watched() as watch:
        yield watch


def loader() -> Any:
    data = torch.utils.data.TensorDataset(torch.randn(2 * BATCHES, 4))
    return torch.utils.data.DataLoader(data, batch_size=2)


def fitted(folder: Path, callback: Any, model: Any = None, **options: Any) -> Any:
    resume = options.pop("ckpt_path", None)
    trainer = pl.Trainer(
        accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, callbacks=[callback], **({"max_epochs": 1} | options),
    )  # fmt: skip
    trainer.fit(model or Model(), loader(), loader(), ckpt_path=resume)
    return trainer


def test_heartbeats_and_the_flag_of_a_finished_training(
    watch: Watch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flag = tmp_path / "finished"
    with pytest.raises(RuntimeError, match="FAULT_TOL_FINISHED_FLAG_FILE"):
        FaultToleranceCallback(autoresume=True, calculate_timeouts=False)
    monkeypatch.setenv("FAULT_TOL_FINISHED_FLAG_FILE", str(flag))
    fitted(tmp_path, FaultToleranceCallback(autoresume=True, calculate_timeouts=False))
    assert flag.exists()
    assert watch.reading.beats > BATCHES
    assert watch.is_paused


def test_sections_and_their_limits_over_two_runs(
    watch: Watch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """NVRx's row 135: limits are updated after a load, at a clean end, and not after an error."""
    caplog.set_level(logging.INFO)
    trainer = fitted(tmp_path, FaultToleranceSectionsCallback(False, True))
    checkpoint = tmp_path / "model.ckpt"
    trainer.save_checkpoint(checkpoint)
    counts = {name: section.count for name, section in watch.sections.items()}
    assert counts["setup"] == 1
    assert counts["step"] == watch.step == BATCHES
    assert counts["validation"] >= BATCHES
    fitted(
        tmp_path, FaultToleranceSectionsCallback(False, True), ckpt_path=checkpoint, max_epochs=2
    )
    saved = json.loads((tmp_path / "ft_state" / "_ft_state_.json").read_text())
    assert "step" in saved["current_timeouts"]["section"]["calculated_sections"]
    assert "[FaultToleranceSectionsCallback@rank0] Updated FT timeouts. New values:" in caplog.text

    caplog.clear()
    failing = FaultToleranceSectionsCallback(
        False,
        True,
        exc_handling_policy=lambda error: WorkloadControlRequest(
            WorkloadAction.ExcludeThisNode, str(error)
        ),
    )
    with pytest.raises(ValueError, match="bad batch"):
        fitted(tmp_path, failing, Model(fails=True))
    assert "Updated FT timeouts" not in caplog.text
    asked = [(one.kind, one.reason) for one in watch.messages if isinstance(one, Requested)]
    assert asked == [("exclude", "bad batch")]


def test_the_detector_reports_at_its_interval(watch: Watch, tmp_path: Path) -> None:
    callback = StragglerDetectionCallback(0, True, True, 3, 0.7, 0.7, True, True)
    fitted(tmp_path, callback, max_epochs=2)
    assert any("training_step" in name for name in watch.sections)
    with pytest.raises(ValueError, match="there is nothing to report"):
        StragglerDetectionCallback(0, False, False, 3, 0.7, 0.7, True, True)


def test_the_best_ranks_are_listed_next_to_the_worst(caplog: pytest.LogCaptureFixture) -> None:
    callback = StragglerDetectionCallback(60, True, False, 2, 0.7, 0.7, False, False)
    report: Any = SimpleNamespace(rank_to_node={7: "n1"})
    with caplog.at_level("INFO"):
        callback._print("relative", {rank: (rank + 1) / 10 for rank in range(8)}, report)
    assert "worst rank 0 (): 0.10, rank 1 (): 0.20; " in caplog.text
    assert caplog.text.rstrip().endswith("best rank 7 (n1): 0.80, rank 6 (): 0.70")


def test_local_checkpoints_are_saved_and_the_newest_of_both_is_loaded(
    watch: Watch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "trainer_sdk.nvrx.ptl_checkpoints")
    manager = LocalCheckpointManager(tmp_path / "disk")
    from lightning.pytorch.plugins.io import TorchCheckpointIO

    io = IO(TorchCheckpointIO(), manager, lambda path: 5)
    trainer = fitted(tmp_path, LocalCheckpointCallback(every_n_train_steps=8), plugins=[io])
    assert manager.find_latest() == 16
    trainer.save_checkpoint(tmp_path / "global.ckpt")
    assert (tmp_path / "global.ckpt").exists()
    assert io.load_checkpoint(tmp_path / "global.ckpt")["global_step"] == 16
    newer = IO(TorchCheckpointIO(), LocalCheckpointManager(tmp_path / "disk"), lambda path: 20)
    assert newer.load_checkpoint(tmp_path / "global.ckpt")["global_step"] == BATCHES
    assert [line for line in caplog.messages if line.startswith("Resuming")] == [
        "Resuming from a local checkpoint: iteration 16 is stored locally, 5 globally",
        "Resuming from a global checkpoint: iteration 16 is stored locally, 20 globally",
    ]
    with pytest.raises(ValueError, match="give either"):
        LocalCheckpointCallback(every_n_train_steps=1, train_time_interval=timedelta(seconds=1))


def test_a_fault_that_is_unknown_is_refused() -> None:
    with pytest.raises(ValueError, match="it is one of random, rank_killed, rank_hung"):
        SimulatedFaultParams("x", 1.0)
