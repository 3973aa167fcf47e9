"""What a training saves into an object store is read back, cleaned up, and pulled for torch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict_loader import load

from everstep_services.cli.__main__ import main
from tests.contract.s3_server import BUCKET, s3_server
from trainer_sdk.checkpoint import Checkpointer
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.names import saving_name


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_training_saves_to_s3_and_plain_torch_loads_what_was_pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    place, to = f"s3://{BUCKET}/llama", tmp_path / "pulled"
    with s3_server(tmp_path) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        weight = torch.zeros(1000)
        state: dict[str, Any] = {"weight": weight, "more": {"step": 0}}
        saves = Checkpointer(place, in_flight=3)
        for step in (1, 2, 3):
            weight += 1
            state["more"] = {"step": step}
            saves.save(step, state)
        saves.close()
        capsys.readouterr()

        assert main(["ckpt", "verify", place, "-o", "json"]) == 0
        found = json.loads(capsys.readouterr().out)["items"]
        assert [(one["step"], one["is_good"]) for one in found] == [
            (3, True),
            (2, True),
            (1, True),
        ]
        storage, going_on = storage_for(place), f"step-000000004/{saving_name(4, 0, '0a', 4)}"
        storage.put(f"{going_on}/__0_0.distcp", (b"as far as it is",))
        assert main(["ckpt", "gc", place, "--keep-last", "1", "--delete"]) == 0
        assert len(storage.files(going_on)) == 1
        assert main(["ckpt", "pull", place, "3", str(to)]) == 0
        capsys.readouterr()
        assert main(["ckpt", "ls", place, "-o", "name"]) == 0
        assert capsys.readouterr().out.split() == ["3"]
    loaded: dict[str, Any] = {"weight": torch.zeros(1000), "more": {"step": 0}}
    load(loaded, checkpoint_id=to / "step-000000003")
    assert torch.equal(loaded["weight"], torch.full((1000,), 3.0))
    assert loaded["more"] == {"step": 3}
