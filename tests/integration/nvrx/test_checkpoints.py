"""NVRx's asynchronous and local checkpoints over our writer: a real writer, real files."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.state_dict_loader import load

from trainer_sdk import testing
from trainer_sdk.nvrx import aliases, async_calls
from trainer_sdk.nvrx.async_calls import AsyncCallsQueue, AsyncRequest
from trainer_sdk.nvrx.filesystem_async import CachedMetadataFileSystemReader, FileSystemWriterAsync
from trainer_sdk.nvrx.local_checkpoints import (
    BaseCheckpointManager,
    CheckpointingException,
    CkptID,
    LocalCheckpointManager,
)
from trainer_sdk.nvrx.save_helpers import preload_tensors
from trainer_sdk.nvrx.state_dict_saver import (
    CheckpointMetadataCache,
    save_state_dict_async_finalize,
    save_state_dict_async_plan,
)
from trainer_sdk.nvrx.tensor_state import BasicTensorAwareStateDict, TensorAwareStateDict
from trainer_sdk.nvrx.torch_ckpt import TorchAsyncCheckpoint

SCRIPT = Path(__file__).parents[2] / "e2e" / "nvrx" / "four_ranks.py"
WITHIN_S = 200
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is:UserWarning")


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with testing.watched():
        yield


@pytest.fixture
def queue() -> Iterator[AsyncCallsQueue]:
    queue = AsyncCallsQueue()
    yield queue
    queue.close(abort=True)


def state(value: float) -> dict[str, Any]:
    return {
        "w": torch.full((100, 3), value), "h": torch.full((5,), value).half(), "e": torch.empty(0),
        "cut": torch.arange(12.0).reshape(3, 4)[:, 1] * value, "step": int(value),
        "optim.m": torch.full((7,), value),
    }  # fmt: skip


def saved(
    folder: Path, value: float, queue: AsyncCallsQueue, **options: Any
) -> FileSystemWriterAsync:
    """Scheduled, and the training goes on."""
    writer = FileSystemWriterAsync(folder, separation_hint="optim")
    training = state(value)
    planned = save_state_dict_async_plan(training, writer, **options)
    function, preload, arguments = writer.get_save_function_and_args()
    request = AsyncRequest(function, arguments, [], preload_fn=preload)
    request.add_finalize_fn(lambda: save_state_dict_async_finalize(*planned))
    queue.schedule_async_request(request)
    for tensor in training.values():
        if isinstance(tensor, torch.Tensor):
            tensor.zero_()
    return writer


def loaded(reader: FileSystemReader) -> dict[str, Any]:
    found = state(0)
    load(found, storage_reader=reader, no_dist=True)
    return found


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return all(
        torch.equal(one[key], other[key]) if isinstance(one[key], torch.Tensor)
        else one[key] == other[key]
        for key in one.keys() | other.keys()
    )  # fmt: skip


def flip_bit(path: Path) -> None:
    octets = bytearray(path.read_bytes())
    octets[len(octets) // 2] ^= 1
    path.write_bytes(octets)


def test_values_are_those_at_the_call_and_torch_can_load_them(
    tmp_path: Path, queue: AsyncCallsQueue
) -> None:
    """A8.3: the training overwrites its tensors at once."""
    saved(tmp_path / "one", 3, queue)
    assert queue.get_num_unfinalized_calls() == 1
    assert queue.maybe_finalize_async_calls(blocking=True) == [1]
    assert queue.get_num_unfinalized_calls() == 0
    assert same(loaded(FileSystemReader(tmp_path / "one")), state(3))
    assert same(loaded(CachedMetadataFileSystemReader(tmp_path / "one")), state(3))
    assert sorted(path.name for path in (tmp_path / "one").glob("*.distcp")) == [
        "__0_0.distcp", "optim__0_0.distcp",
    ]  # fmt: skip


def test_plans_are_reused_while_the_structure_is_the_same(
    tmp_path: Path, queue: AsyncCallsQueue
) -> None:
    cache = CheckpointMetadataCache()
    reuses = []
    for number in (1, 2, 3):
        saved(tmp_path / str(number), number, queue, enable_cache=True, metadata_cache=cache)
        queue.maybe_finalize_async_calls(blocking=True)
        reuses.append(cache.validated_cache_reuse)
        assert same(loaded(FileSystemReader(tmp_path / str(number))), state(number))
    assert reuses == [False, True, True]

    after = CheckpointMetadataCache()
    after.set_cached_global_metadata(FileSystemReader(tmp_path / "3").read_metadata())
    writer = FileSystemWriterAsync(tmp_path / "4")
    save_state_dict_async_plan(
        {"other": torch.ones(2)}, writer, enable_cache=True, metadata_cache=after
    )
    assert not after.validated_loaded_metadata_reuse


def test_a_damaged_file_is_found_before_it_is_loaded(
    tmp_path: Path, queue: AsyncCallsQueue
) -> None:
    """A8.8: one bit."""
    saved(tmp_path / "one", 3, queue)
    queue.maybe_finalize_async_calls(blocking=True)
    flip_bit(tmp_path / "one" / "__0_0.distcp")
    with pytest.raises(CheckpointException, match="is not what was saved"):
        loaded(CachedMetadataFileSystemReader(tmp_path / "one", cache_metadata=False))


def test_metadata_is_read_once(tmp_path: Path, queue: AsyncCallsQueue) -> None:
    saved(tmp_path / "one", 3, queue)
    queue.maybe_finalize_async_calls(blocking=True)
    reader = CachedMetadataFileSystemReader
    first = reader(tmp_path / "one").read_metadata()
    assert reader(tmp_path / "one").read_metadata() is first
    reader.clear_metadata_cache(tmp_path / "one")
    assert reader(tmp_path / "one").read_metadata() is not first


def test_a_writer_that_fails_fails_the_save_and_not_the_next(
    tmp_path: Path, queue: AsyncCallsQueue
) -> None:
    """A8.2: the error is raised where the save is finalized; without metadata nothing is there."""
    (tmp_path / "file").touch()
    saved(tmp_path / "one", 3, queue)
    (tmp_path / "taken").mkdir()
    writer = FileSystemWriterAsync(tmp_path / "taken")
    planned = save_state_dict_async_plan(state(4), writer)
    (tmp_path / "taken" / "__0_0.distcp").mkdir()
    function, preload, arguments = writer.get_save_function_and_args()
    request = AsyncRequest(
        function, arguments, [lambda: save_state_dict_async_finalize(*planned)], preload_fn=preload
    )
    queue.schedule_async_request(request)
    with pytest.raises(CheckpointException, match="is not a regular file"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert not (tmp_path / "taken" / ".metadata").exists()
    assert same(loaded(FileSystemReader(tmp_path / "one")), state(3))
    saved(tmp_path / "next", 5, queue)
    queue.maybe_finalize_async_calls(blocking=True)
    assert same(loaded(FileSystemReader(tmp_path / "next")), state(5))


def test_a_function_of_the_training_runs_later_with_what_was_preloaded(
    queue: AsyncCallsQueue,
) -> None:
    done: list[Any] = []

    def write(*arguments: Any, **options: Any) -> None:
        done.append((arguments, options))

    request = AsyncRequest(
        write, ("path", None), [lambda: done.append("end")], {"x": 1}, preload_fn=lambda: "state"
    )
    assert queue.schedule_async_request(request) == 1
    assert queue.maybe_finalize_async_calls(blocking=True, no_dist=True) == [1]
    assert done == [(("path", "state"), {"x": 1}), "end"]
    with pytest.raises(RuntimeError, match="add finalize functions before"):
        request.freeze().add_finalize_fn(lambda: None)


def test_an_error_of_a_function_is_raised_once_and_the_next_request_goes_on(
    queue: AsyncCallsQueue,
) -> None:
    def fail() -> None:
        raise OSError("no disk")

    queue.schedule_async_request(AsyncRequest(fail, (), [lambda: pytest.fail("it failed")]))
    queue.schedule_async_request(AsyncRequest(None, (), []))
    with pytest.raises(CheckpointException, match="no disk"):
        queue.maybe_finalize_async_calls(blocking=True)
    assert queue.maybe_finalize_async_calls(blocking=True) == [2]
    queue.schedule_async_request(AsyncRequest(None, (), []))
    async_calls.abort_nvrx_checkpoint()
    assert queue.get_num_unfinalized_calls() == 0


def test_torch_save_in_the_background(tmp_path: Path) -> None:
    checkpoint = TorchAsyncCheckpoint()
    weights = torch.ones(1000)
    checkpoint.async_save({"w": weights}, tmp_path / "file.pt")
    checkpoint.save({"w": weights}, tmp_path / "now.pt")
    weights.zero_()
    checkpoint.finalize_async_save(blocking=True)
    for name in ("file.pt", "now.pt"):
        assert torch.load(tmp_path / name)["w"].sum() == 1000
    with pytest.raises(TypeError, match="async_save writes to a path"):
        checkpoint.async_save({}, sys.stdout)
    with pytest.raises(CheckpointException, match="async_save writes to a path"):
        checkpoint.finalize_async_save(no_dist=False)
    checkpoint.finalize_async_save(no_dist=False)
    checkpoint.async_save({"w": weights}, tmp_path / "missing" / "file.pt")
    with pytest.raises(CheckpointException, match="there is no folder"):
        checkpoint.finalize_async_save(blocking=True, no_dist=False)
    checkpoint.close()


def local(value: float) -> BasicTensorAwareStateDict:
    return BasicTensorAwareStateDict({"w": torch.full((9,), value), "value": value})


class OwnState(TensorAwareStateDict):
    """A script's state that has only what a save and a load without replication need."""

    tensors = is_hollow = property(lambda self: 1 / 0)
    pop_tensors = insert_tensors = init_tensors = lambda *_: 1 / 0  # type: ignore[assignment]

    def __init__(self, value: float) -> None:
        self.weights = torch.full((9,), value)
        self.moves: list[str] = []

    def copy_tensors_to_cpu(self, non_blocking: bool = False) -> None:
        self.moves.append("cpu")

    def restore_tensor_device(self, non_blocking: bool = True) -> None:
        self.moves.append("device")


@pytest.mark.parametrize("is_async", [True, False])
def test_a_state_of_the_scripts_own_needs_no_more_than_copies_and_a_pickle(
    tmp_path: Path, is_async: bool
) -> None:
    manager = LocalCheckpointManager(tmp_path / "node")
    request = manager.save(OwnState(7.0), 1, is_async)
    if request is not None:
        request.execute_sync()
    assert (request is not None) is is_async
    again = LocalCheckpointManager(tmp_path / "node")
    assert again.find_latest() == 1
    state, id_ = again.load()
    assert isinstance(state, OwnState)
    assert id_ == (1, 0, "")
    assert state.weights.tolist() == [7.0] * 9
    assert state.moves == ["cpu", "device"]
    with pytest.raises(CheckpointingException, match="at least 0, and is -1"):
        manager.save(OwnState(7.0), -1)


class OwnManager(BaseCheckpointManager):
    """A script's manager, in memory, with what NVRx asks of one and no more."""

    def __init__(self) -> None:
        super().__init__("", None)
        self.states: dict[CkptID, TensorAwareStateDict] = {}
        self.lost: set[int] = set()

    def _my_ckpt_ids(self) -> list[CkptID]:
        return list(self.states)

    def _load(self, ckpt_id: CkptID) -> TensorAwareStateDict:
        if ckpt_id[0] in self.lost:
            raise CheckpointingException(f"{ckpt_id} is lost")
        return self.states[ckpt_id]

    def _save(self, state_dict: TensorAwareStateDict, ckpt_id: CkptID) -> None:
        self.states[ckpt_id] = state_dict

    def _cleanup(self, iteration: int) -> None:
        pass

    def _cleanup_failed_save(self, iteration: int) -> None:
        pass


def test_a_manager_of_the_scripts_own_passes_over_what_it_cannot_load() -> None:
    manager = OwnManager()
    for iteration in (1, 2):
        manager.save(OwnState(float(iteration)), iteration)
    assert manager.load()[1] == (2, 0, "")
    manager.lost = {2}
    assert manager.load()[1] == (1, 0, "")
    manager.lost = set()
    manager.save(OwnState(2.0), 2)  # it counts again
    assert manager.load()[1] == (2, 0, "")


def test_tensors_of_the_cpu_are_preloaded_as_copies() -> None:
    state: dict[str, Any] = {"step": torch.tensor(3.0, requires_grad=True), "list": [torch.ones(2)]}
    preloaded = preload_tensors(state)
    with torch.no_grad():
        state["step"].zero_()
        state["list"][0].zero_()
    assert not preloaded["step"].requires_grad
    assert preloaded["step"] == 3.0
    assert preloaded["list"][0].tolist() == [1.0, 1.0]


def test_local_checkpoints_are_found_loaded_and_replaced(tmp_path: Path) -> None:
    """NVRx's row 95, and A9.2: what belongs to another run or number of ranks does not count."""
    manager = LocalCheckpointManager(tmp_path / "node")
    assert manager.find_latest() == -1
    manager.save(local(1), 1)
    assert LocalCheckpointManager(tmp_path / "node").find_latest() == 1
    assert LocalCheckpointManager(tmp_path / "node", "other").find_latest() == -1
    manager.save(local(2), 2)
    assert [path.name for path in sorted(manager.local_ckpt_dir.iterdir())] == [
        "iter_0000002_0_local.json", "iter_0000002_0_local.pt",
    ]  # fmt: skip
    with pytest.raises(CheckpointingException, match="2 is not newer than 2"):
        manager.save(local(2), 2)
    again = LocalCheckpointManager(tmp_path / "node")
    assert again.find_latest() == 2
    found, id_ = again.load()
    assert id_ == (2, 0, "")
    assert isinstance(found, BasicTensorAwareStateDict)
    assert found.to_state_dict()["w"].tolist() == [2] * 9
    shutil.move(manager.local_ckpt_dir, manager.local_ckpt_dir.with_name("7"))  # it was rank 7
    again = LocalCheckpointManager(tmp_path / "node")
    assert again.find_latest() == 2
    assert next(iter(again.load()[0].tensors)).tolist() == [2] * 9
    shutil.move(manager.local_ckpt_dir.with_name("7"), manager.local_ckpt_dir)
    (manager.local_ckpt_dir / "iter_0000002_0_local.pt").unlink()
    assert LocalCheckpointManager(tmp_path / "node").find_latest() == -1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
@pytest.mark.parametrize("foreign", [".", "iter_0000001_0_local.pt", "iter_0000001_0_local.json"])
def test_what_another_user_has_put_there_is_not_unpickled(
    tmp_path: Path, foreign: str, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = LocalCheckpointManager(tmp_path / "node")
    manager.save(local(1), 1)
    os.chown(manager.local_ckpt_dir / foreign, 1234, 1234)
    assert LocalCheckpointManager(tmp_path / "node").find_latest() == -1
    assert "belongs to another user" in capsys.readouterr().err


def test_an_asynchronous_local_save_counts_once_it_is_finalized(
    tmp_path: Path, queue: AsyncCallsQueue
) -> None:
    manager = LocalCheckpointManager(tmp_path / "node")
    training = local(1)
    request = manager.save(training, 1, is_async=True)
    assert request is not None
    next(iter(training.tensors)).zero_()
    assert LocalCheckpointManager(tmp_path / "node").find_latest() == -1
    queue.schedule_async_request(request)
    queue.maybe_finalize_async_calls(blocking=True)
    assert manager.find_latest() == 1
    found, _ = manager.load()
    assert next(iter(found.tensors)).tolist() == [1] * 9


@pytest.mark.parametrize("harm", [flip_bit, lambda path: os.truncate(path, 10)])
def test_a_damaged_local_checkpoint_is_put_aside(
    tmp_path: Path, harm: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    manager = LocalCheckpointManager(tmp_path / "node")
    manager.save(local(1), 1)
    harm(manager.local_ckpt_dir / "iter_0000001_0_local.pt")
    again = LocalCheckpointManager(tmp_path / "node")
    assert again.find_latest() == 1
    with pytest.raises(CheckpointingException, match="restore a global one"):
        again.load()
    assert "is not what was saved" in capsys.readouterr().err
    assert LocalCheckpointManager(tmp_path / "node").find_latest() == -1
    again.save(local(1), 1)
    assert again.find_latest() == 1


def test_a_local_save_that_fails_leaves_the_one_before(tmp_path: Path) -> None:
    manager = LocalCheckpointManager(tmp_path / "node")
    manager.save(local(1), 1)
    (manager.local_ckpt_dir / "iter_0000002_0_local.pt").mkdir()
    with pytest.raises(CheckpointingException, match="of iteration 2 failed .* newest one is of 1"):
        manager.save(local(2), 2)
    assert manager.find_latest() == 1
    manager.save(local(3), 3)
    assert manager.find_latest() == 3


@pytest.mark.chaos
@pytest.mark.timeout(WITHIN_S + 40)
def test_four_ranks_lose_a_node_and_a_bit_and_go_on(tmp_path: Path) -> None:
    """A9.1: copies on another node; every rank is restored, bit by bit, from what is left."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
            *("--nproc-per-node", "4", str(SCRIPT), str(tmp_path)),
        ],
        check=False,
        capture_output=True,
        text=True,
        timeout=WITHIN_S,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": aliases.FOLDER},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(path.name for path in tmp_path.glob("done-*")) == [
        f"done-{rank}" for rank in range(4)
    ]
