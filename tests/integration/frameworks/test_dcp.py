"""`torch.distributed.checkpoint` saves and loads through Everstep's writer and verification."""

from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as load_state
from torch.distributed.checkpoint.state_dict_saver import async_save
from torch.distributed.checkpoint.state_dict_saver import save as save_state

from tests.integration.frameworks.ranks import launch
from trainer_sdk import Checkpointer, layout
from trainer_sdk.checkpoint.image_folder import ON_DISK
from trainer_sdk.checkpoint.manifest import MANIFEST, Manifest, decode
from trainer_sdk.checkpoint.save import buffers
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.checkpoints import look, stored_checkpoints, verify
from trainer_sdk.integrations.dcp import (
    DcpReader,
    DcpStager,
    DcpWriter,
    newest_verified,
    rank_saves,
)
from trainer_sdk.integrations.dcp.checkpoint_id import split

WITHIN_S = 220.0
pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.distributed is disabled", "ignore:`synchronize_staging` is deprecated"
)


@pytest.fixture(autouse=True)
def no_writer_is_left() -> Iterator[None]:
    yield
    for saves in list(rank_saves._opened.values()):
        saves.close()
    rank_saves._opened.clear()


def state(step: int) -> dict[str, Any]:
    weights = {f"w{one}": torch.full((7, 3), float(one * step)) for one in range(3)}
    odd = {"scalar": torch.tensor(step), "none": torch.empty(0), "half": torch.ones(5).half()}
    return {"model": weights | odd, "step": step, "texts": ["a", ("b", 2)]}


def blank() -> dict[str, Any]:
    return state(0) | {"texts": None}


def is_same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(is_same(left[key], right[key]) for key in left)
    return bool(left == right)


def save(root: Path, *steps: int) -> None:
    for step in steps:
        save_state(state(step), checkpoint_id=f"{root}/step-{step}", storage_writer=DcpWriter())


def load(place: object) -> dict[str, Any]:
    loaded = blank()
    load_state(loaded, checkpoint_id=str(place), storage_reader=DcpReader())
    return loaded


def damage(root: Path, step: int) -> None:
    shard = root / f"step-{step:09d}" / "__0_0.distcp"
    octets = bytearray(shard.read_bytes())
    octets[len(octets) // 2] ^= 1
    shard.write_bytes(octets)


def test_a_save_is_visible_verified_and_loaded_bit_for_bit(tmp_path: Path) -> None:
    """What is loaded is what was saved, and every byte has a hash."""
    save(tmp_path, 5, 10)
    storage = storage_for(str(tmp_path))
    assert [there.step for there in stored_checkpoints(storage)] == [10, 5]
    there = look(storage, 10)
    assert there is not None
    assert verify(storage, there).is_good
    assert is_same(load(tmp_path / "step-10"), state(10))
    assert is_same(load(tmp_path / "step-5"), state(5))


def test_a_full_disk_of_the_node_stops_no_save_into_the_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    images = tmp_path / "images"
    images.mkdir()
    (images / ON_DISK).touch()
    monkeypatch.setenv(layout.IMAGES_VARIABLE, str(images))
    monkeypatch.setattr(buffers, "free_bytes", lambda _: 0)
    for step in (1, 2):
        place = tmp_path / f"step-{step}"
        save_state(state(step), checkpoint_id=place, storage_writer=DcpWriter(keep_memory=True))
        assert is_same(load(place), state(step))
    assert capsys.readouterr().err.count("is not kept on this node any more: the disk of") == 1


def test_torch_reads_what_is_saved_without_everstep(tmp_path: Path) -> None:
    save(tmp_path, 5)
    loaded = blank()
    load_state(loaded, checkpoint_id=str(tmp_path / "step-000000005"))
    assert is_same(loaded, state(5))


def test_a_checkpointer_restores_what_torch_has_saved(tmp_path: Path) -> None:
    save(tmp_path, 5)
    loaded = blank()
    with Checkpointer(tmp_path) as saves:
        restored = saves.restore(loaded)
    assert restored is not None
    assert restored.step == 5
    assert is_same(loaded, state(5))


def test_a_checkpointer_and_torch_save_into_one_root(tmp_path: Path) -> None:
    """Both are writers of one launch, so neither is refused as a second one."""
    with Checkpointer(tmp_path, every=1000) as saves:
        assert saves.save(1, state(1), wait=True).durable
        save(tmp_path, 5)
        assert saves.save(7, state(7), wait=True).durable
    there = stored_checkpoints(storage_for(str(tmp_path)))
    assert [checkpoint.step for checkpoint in there] == [7, 5, 1]


def test_without_a_step_the_newest_checkpoint_is_loaded(tmp_path: Path) -> None:
    save(tmp_path, 5, 10)
    assert load(tmp_path)["step"] == 10


def test_an_asynchronous_save_has_the_values_at_the_call(tmp_path: Path) -> None:
    """The training changes the state at once; the copy is what is saved (A8.3)."""
    stager = DcpStager()
    current = state(1)
    for step in (1, 2, 3):
        current["step"] = step
        current["model"]["w1"].fill_(step)
        saving = async_save(
            current,
            checkpoint_id=f"{tmp_path}/step-{step}",
            storage_writer=DcpWriter(),
            async_stager=stager,
            no_dist=True,
        )
        current["model"]["w1"].fill_(-1.0)
        assert isinstance(saving, Future)
        saving.result(timeout=WITHIN_S)
    for step in (1, 2, 3):
        loaded = load(tmp_path / f"step-{step}")
        assert loaded["step"] == step
        assert torch.equal(loaded["model"]["w1"], torch.full((7, 3), float(step)))


@pytest.mark.variant
@pytest.mark.timeout(600)
def test_a_process_of_torch_saves_as_well(tmp_path: Path) -> None:
    """`AsyncCheckpointerType.PROCESS`: the writer is used in a process that is not the rank."""
    launch("dcp_process.py", str(tmp_path))
    loaded = {"w": torch.zeros(5)}
    load_state(loaded, checkpoint_id=str(tmp_path), storage_reader=DcpReader())
    assert torch.equal(loaded["w"], torch.full((5,), 2.0))


def test_a_stager_uses_its_memory_again_only_when_no_copy_needs_it() -> None:
    stager, value = DcpStager(), torch.arange(1000.0)
    first = stager.stage({"w": {"inner": [value]}, "n": 1})
    second = stager.stage({"w": {"inner": [value + 1]}, "n": 2})
    assert torch.equal(first["w"]["inner"][0], value)
    place = first["w"]["inner"][0].data_ptr()
    assert second["w"]["inner"][0].data_ptr() != place
    del first
    third = stager.stage({"w": {"inner": [value + 2]}, "n": 3})
    assert third["w"]["inner"][0].data_ptr() == place
    assert torch.equal(second["w"]["inner"][0], value + 1)
    assert torch.equal(third["w"]["inner"][0], value + 2)


def test_a_damaged_checkpoint_is_quarantined_and_an_older_one_is_found(tmp_path: Path) -> None:
    """A flipped bit is never loaded (A8.8)."""
    save(tmp_path, 5, 10, 15)
    damage(tmp_path, 10)
    damage(tmp_path, 15)
    loaded = blank()
    with pytest.raises(CheckpointException, match="differs from what was saved"):
        load_state(loaded, checkpoint_id=str(tmp_path / "step-15"), storage_reader=DcpReader())
    assert is_same(loaded, blank())
    assert newest_verified(tmp_path) == 5
    marked = look(storage_for(str(tmp_path)), 10)
    assert marked is not None
    assert marked.quarantined is not None
    save(tmp_path, 15)
    assert newest_verified(tmp_path) == 15


def test_a_place_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert newest_verified(tmp_path) is None
    with pytest.raises(CheckpointException, match="no checkpoint of step 5"):
        load(tmp_path / "step-5")


def test_a_value_that_no_restore_would_read_is_refused_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException, match="odd cannot be read"):
        save_state(
            {"odd": tmp_path.stat()},
            checkpoint_id=f"{tmp_path}/step-1",
            storage_writer=DcpWriter(),
        )
    assert stored_checkpoints(storage_for(str(tmp_path))) == []


@pytest.mark.parametrize(
    ("name", "step"),
    [("step-7", 7), ("step_7", 7), ("iter_0000007", 7), ("run.epoch=1-step=7", 7), ("run-7", None)],
)
def test_the_step_is_at_the_end_of_the_checkpoint_id(name: str, step: int | None) -> None:
    root = "/ckpt" if step else f"/ckpt/{name}"
    assert split(f"/ckpt/{name}") == (root, step)


def test_a_checkpoint_id_without_a_step_is_refused_with_an_example() -> None:
    with pytest.raises(ValueError, match="must end in a step, as .*/step-100, and is /ckpt/last"):
        DcpWriter("/ckpt/last")


def test_a_save_of_a_visible_step_is_refused_and_names_the_command(tmp_path: Path) -> None:
    save(tmp_path, 5)
    save_state(state(5), checkpoint_id=f"{tmp_path}/step-5", storage_writer=DcpWriter())  # the same
    assert is_same(load(tmp_path / "step-5"), state(5))


@pytest.mark.timeout(600)
def test_ranks_save_shards_which_a_single_process_loads(tmp_path: Path) -> None:
    """Two ranks save and load; one loads the whole: torch's own resharding.

    In `failing`, the copy of a rank fails: nothing of that step is visible, and the next is saved.
    """
    launch("dcp_ranks.py", str(tmp_path), ranks=2)
    octets = (tmp_path / "save" / "step-000000003" / MANIFEST).read_bytes()
    assert decode(octets, Manifest, "manifest").identity.world_size == 2
    rows = torch.arange(12 * 5, dtype=torch.float32).reshape(12, 5)
    for root, steps in {"save": [3, 2, 1], "cached": [3, 2, 1], "failing": [2]}.items():
        there = stored_checkpoints(storage_for(str(tmp_path / root)))
        assert [one.step for one in there] == steps
        model = {"sharded": rows * 0, "same": rows * 0}
        own = {str(rank): torch.zeros(3) for rank in range(2)}
        loaded = {"model": model, "step": 0, "own": own}
        load_state(loaded, checkpoint_id=str(tmp_path / root), storage_reader=DcpReader())
        assert loaded["step"] == steps[0]
        for tensor in model.values():
            assert torch.equal(tensor, rows * steps[0])
        for tensor in own.values():
            assert torch.equal(tensor, torch.full((3,), float(steps[0])))
