"""`everstep ckpt export`: safetensors that transformers reads, verified, and never over others."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, GPT2Config

from everstep_services.cli.__main__ import main
from everstep_services.cli.errors import Exit
from tests.unit.trainer_sdk.checkpoint.saved_states import Place, flip_bit
from trainer_sdk.checkpoint.storage.checkpoints import QUARANTINED

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    monkeypatch.setenv("EVERSTEP_STATE_DIR", str(tmp_path / "state"))

    def command(*words: object) -> tuple[int, str, str]:
        code = main(["ckpt", "export", *map(str, words)])
        out, err = capsys.readouterr()
        return code, out, err

    return command


@pytest.fixture
def model(tmp_path: Path) -> torch.nn.Module:
    """A small GPT-2, saved after step 5 in bfloat16, and its configuration."""
    torch.manual_seed(3)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=6000, n_positions=32)
    made: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path / "like")
    (tmp_path / "like/model.safetensors").write_bytes(b"other weights")
    Place(tmp_path).publish(5, {"model": made, "step": 5, "extra": {"w": torch.ones(2)}})
    return made


def test_a_folder_is_read_by_from_pretrained(
    run: Run, model: torch.nn.Module, tmp_path: Path
) -> None:
    for words, files in ((["--shard-mb", "1"], 2), ([], 1)):
        to = tmp_path / f"to-{files}"
        code, out, err = run(tmp_path / "root", 5, to, "--like", tmp_path / "like", *words)
        assert code == 0, err
        assert f"{to}: 29 tensors in " in out
        assert len(list(to.glob("model*.safetensors"))) == files
        assert (to / "model.safetensors.index.json").exists() is (files > 1)
        again = AutoModelForCausalLM.from_pretrained(to, dtype=torch.bfloat16)
        assert again.state_dict().keys() == model.state_dict().keys()
        for key, right in model.state_dict().items():
            assert torch.equal(again.state_dict()[key], right), key
    assert not [one for one in tmp_path.iterdir() if one.name.startswith("to-") and "." in one.name]


def test_one_file_has_the_keys_below_a_prefix(
    run: Run, model: torch.nn.Module, tmp_path: Path
) -> None:
    to = tmp_path / "some.safetensors"
    code, out, _ = run(tmp_path / "root", 5, to, "--prefix", "extra.", "-o", "json")
    assert code == 0
    record = json.loads(out)
    assert (record["tensors"], record["files"]) == (1, ["some.safetensors"])
    assert list(load_file(to)) == ["w"]
    before = to.read_bytes()
    code, _, err = run(tmp_path / "root", 5, to)
    assert code == Exit.ERROR
    assert "is there already" in err
    assert to.read_bytes() == before


@pytest.mark.usefixtures("model")
def test_nothing_is_exported_of_what_is_damaged_quarantined_or_not_there(
    run: Run, tmp_path: Path
) -> None:
    root, to = tmp_path / "root", tmp_path / "to"
    assert (
        "no key of a tensor begins with 'other.': there are extra, model, step"
        in run(root, 5, to, "--prefix", "other.")[2]
    )
    assert run(root, 6, to)[0] == Exit.NOT_FOUND
    assert "to.gguf: safetensors alone are written" in run(root, 5, tmp_path / "to.gguf")[2]
    mark = root / "step-000000005" / QUARANTINED
    mark.write_text('{"reason":"nan"}')
    assert "is quarantined: nan; release it first" in run(root, 5, to)[2]
    mark.unlink()
    flip_bit(root / "step-000000005/__0_0.distcp", 40_001)
    code, _, err = run(root, 5, to)
    assert code == Exit.ERROR
    assert "differs from what was saved" in err
    assert not [one for one in tmp_path.iterdir() if one.name.startswith("to")]
