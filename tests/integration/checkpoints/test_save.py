"""One rank saves: what torch reads is what was there at the call, whatever came after it."""

import copy
import gc
import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import xxhash

from tests.checkpoint_helpers.saved_by import load, manifest_of, path_of, same, saving
from trainer_sdk.checkpoint import Checkpointer, FileSaver
from trainer_sdk.checkpoint.manifest import IMAGE, INDEX, ImageIndex, decode
from trainer_sdk.checkpoint.save import staging
from trainer_sdk.checkpoint.save.request import SaveRequest


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder that costs no time to sync."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        yield Path(folder)


def all_kinds() -> dict[str, Any]:
    return {
        "nested": {"a": torch.randn(17, 3), "list": [torch.arange(5), {"deep": torch.ones(2)}]},
        "scalar": torch.tensor(7),
        "flag": torch.tensor([True, False]),
        "empty": torch.empty(0, 4),
        "half": torch.randn(9).to(torch.bfloat16),
        "complex": torch.randn(3, dtype=torch.complex64),
        "strided": torch.randn(6, 4).t(),
        "view": torch.randn(100)[10:20],
        "value": {"lr": 0.1, "name": "cosine", "steps": [1, 2, 3]},
        "pair": (1, "two"),
    }


def blank(state: Any) -> Any:
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list) and any(isinstance(one, dict | torch.Tensor) for one in state):
        return [blank(one) for one in state]
    if isinstance(state, torch.Tensor):
        return torch.zeros_like(state)
    return None


class Training:
    """A model with buffers that forward changes, and an optimizer with state."""

    def __init__(self) -> None:
        self.model = torch.nn.Sequential(
            torch.nn.Linear(32, 480), torch.nn.BatchNorm1d(480), torch.nn.Linear(480, 8)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.ema = {key: one.clone() for key, one in self.model.state_dict().items()}
        self.step()

    @property
    def weight(self) -> torch.Tensor:
        found: torch.Tensor = self.model.state_dict()["0.weight"]
        return found

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "ema": self.ema}

    def values(self) -> dict[str, Any]:
        """A copy of everything."""
        return copy.deepcopy(
            {
                "model": dict(self.model.state_dict()),
                "optimizer": self.optimizer.state_dict(),
                "ema": self.ema,
            }
        )

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.model(torch.randn(16, 32)).square().sum().backward()
        self.optimizer.step()
        for one in self.ema.values():
            one.add_(1)


def test_plain_torch_reads_every_kind_of_state(tmp_path: Path) -> None:
    state = all_kinds()
    with saving(tmp_path) as rank:
        rank.save(10, state)
        assert rank.finish() == [1]
    found = load(tmp_path, 10, blank(state))
    assert same(found, state)


def test_the_manifest_has_the_hash_of_each_file(tmp_path: Path) -> None:
    with saving(tmp_path) as rank:
        rank.save(10, {"a": torch.randn(1000)}, occasion="preemption")
        rank.finish()
    manifest = manifest_of(tmp_path, 10)
    assert manifest.identity.step == 10
    assert manifest.occasion == "preemption"
    assert {one.name for one in manifest.files} == {"__0_0.distcp", ".metadata"}
    for one in manifest.files:
        octets = (path_of(tmp_path, 10) / one.name).read_bytes()
        assert (one.size_bytes, one.hash) == (len(octets), xxhash.xxh3_128_hexdigest(octets))
    assert not list((tmp_path / "root" / ".saving").iterdir())
    assert sorted(one.name for one in (tmp_path / "root").glob("[!.]*")) == [
        "owner.json",
        "step-000000010",
    ]


@pytest.mark.parametrize("is_lazy", [True, False])
def test_what_is_saved_is_the_state_at_the_call(in_memory: Path, is_lazy: bool) -> None:
    """Everything changes at once after it: parameters by a step, the rest directly (A8.3)."""
    training = Training()
    with saving(in_memory, is_lazy=is_lazy) as rank:
        for step in range(1, 13):
            expected = training.values()
            rank.save(step, training.state)
            training.step()
            training.step()
            rank.finish()
            found = blank(expected)
            load(in_memory, step, found)
            assert same(found, expected), f"step {step}"
    assert not rank.told.warned


def test_lazy_copies_nothing_of_an_optimizer_before_its_next_step_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step waits, and only its step."""
    training = Training()
    with saving(tmp_path) as rank:
        rank.save(1, training.state)
        rank.finish()
        order: list[str] = []
        stager, kind = rank.saver._stager, torch.optim.AdamW
        monkeypatch.setattr(stager, "settle", _noted(stager.settle, order, "waited"))
        monkeypatch.setattr(kind, "_init_group", _noted(kind._init_group, order, "changed"))
        rank.save(2, training.state)
        order.clear()
        training.step()
    assert order[:2] == ["waited", "changed"]


def counted(training: Training) -> None:
    with torch.no_grad():
        training.weight.zero_()


def swapped(training: Training) -> None:
    """An average of the weights is put in their place for a while; torch does not count that."""
    for key, one in training.model.named_parameters():
        one.data.copy_(training.ema[key])


def by_numpy(training: Training) -> None:
    training.weight.numpy()[:] = 5


def moments(training: Training) -> None:
    for one in training.optimizer.state.values():
        one["exp_avg"].data.mul_(2)


@pytest.mark.parametrize("change", [counted, swapped, by_numpy, moments])
def test_what_is_changed_without_its_optimizer_is_never_saved_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Training], None]
) -> None:
    """The save is refused, and the next one is right (A8.3)."""
    training, go_on, copy_beside = Training(), threading.Event(), staging._copy_in_background
    with saving(tmp_path) as rank:
        rank.save(1, training.state)
        rank.finish()
        monkeypatch.setattr(
            staging, "_copy_in_background", lambda one: (go_on.wait(30), copy_beside(one))
        )
        rank.save(2, training.state)
        change(training)
        go_on.set()
        assert rank.finish() == []
        assert "was changed before the optimizer's step" in rank.told.warned[0]
        assert not path_of(tmp_path, 2).exists()
        training.step()
        expected = training.values()
        rank.save(3, training.state)
        change(training)
        assert rank.finish() == [3]
    assert same(load(tmp_path, 3, blank(expected)), expected)


def test_what_is_changed_once_it_is_copied_is_saved_as_it_was(tmp_path: Path) -> None:
    training = Training()
    with saving(tmp_path) as rank:
        rank.save(1, training.state)
        rank.finish()
        expected = training.values()
        rank.save(2, training.state)
        rank.saver.settle()
        swapped(training)
        assert rank.finish() == [2]
    assert same(load(tmp_path, 2, blank(expected)), expected)


def test_an_image_is_all_that_a_rank_needs(tmp_path: Path) -> None:
    state = {"a": torch.randn(300), "b": {"c": torch.arange(7)}, "value": {"lr": 0.5}}
    with saving(tmp_path, keeps=True, buffers=2, root="") as rank:
        rank.saver.save(_in_memory(4), state)
        assert rank.finish() == [1]
        told = rank.events("image")[0]
        folder = Path(told["folder"])
        index = decode((folder / INDEX).read_bytes(), ImageIndex, INDEX)
        octets = (folder / IMAGE).read_bytes()[: index.size_bytes]
        assert xxhash.xxh3_128_hexdigest(octets) == index.hash == told["hash"]
        assert index.identity.step == told["step"] == 4
        found = {one.key: octets[one.offset : one.offset + one.length] for one in index.entries}
        assert found.keys() == {"a", "b.c", "value.lr"}
        assert found["b.c"] == state["b"]["c"].numpy().tobytes()  # type: ignore[index]


def test_the_newest_image_stays_until_there_is_a_newer_one(tmp_path: Path) -> None:
    with saving(tmp_path, keeps=True, buffers=2, root="") as rank:
        held = []
        for step in (1, 2, 3):
            rank.saver.save(_in_memory(step), {"a": torch.full((9,), float(step))})
            whole = {one.step for one in rank.saver._preparation.arena.buffers}
            assert step == 1 or step - 1 in whole, f"while step {step} is copied"
            rank.finish()
            held.append(rank.events("image")[-1]["folder"])
        assert held[0] == held[2] != held[1]


def test_two_hundred_saves_leave_nothing_behind(in_memory: Path) -> None:
    """Memory, descriptors, threads, processes and files stay as they were (A8.4)."""
    state = {"a": torch.randn(1 << 18), "value": {"step": 0}}
    me = psutil.Process()

    def used(writer: int) -> tuple[int, ...]:
        process = psutil.Process(writer)
        gc.collect()  # what another test has left would go at any moment
        memory = me.memory_info().rss + process.memory_info().rss
        shared = [one.stat() for one in in_memory.rglob("*")]
        images = [one.stat().st_blocks for one in (in_memory / "images").rglob(IMAGE)]
        return (
            memory >> 20,
            me.num_fds() + process.num_fds(),
            me.num_threads(),
            len(me.children()),
            len(shared),
            sum(images),
        )

    with saving(in_memory, keeps=True, buffers=2) as rank:
        seen = []
        for step in range(1, 201):
            state["value"]["step"] = step  # type: ignore[index]
            rank.save(step, state)
            rank.finish()
            if step in (20, 200):
                seen.append(used(rank.writer))
            for one in sorted((in_memory / "root").glob("step-*"))[:-1]:
                _remove(one)
    (memory, *before), (memory_after, *after) = seen
    assert after == before
    assert memory_after <= memory * 1.02 + 2


def test_a_state_larger_than_its_memory_comes_in_waves(tmp_path: Path) -> None:
    """The buffers never exceed the limit (A8.4)."""
    state = all_kinds() | {"large": torch.randn(1 << 17)}
    expected = copy.deepcopy(state)
    with saving(tmp_path, memory_limit=1 << 16) as rank:
        for step in (1, 2):
            rank.save(step, state, wait=True)
        for key in ("large", "strided"):
            state[key].zero_()  # what is saved is what was there at the call
        assert rank.finish() == [1, 2]
        assert sum(one.size for one in rank.saver._preparation.arena.buffers) <= 1 << 16
    found = load(tmp_path, 2, blank(state))
    assert same(found["large"], expected["large"])
    assert same(found["strided"], expected["strided"])
    assert same(found["value"], expected["value"])
    name = manifest_of(tmp_path, 2).files[0]
    octets = (path_of(tmp_path, 2) / name.name).read_bytes()
    assert xxhash.xxh3_128_hexdigest(octets) == name.hash


def test_values_may_grow_and_tensors_come_and_go(tmp_path: Path) -> None:
    with saving(tmp_path) as rank:
        for step in range(1, 6):
            state = {f"t{one}": torch.full((step,), one) for one in range(step)}
            state["value"] = {"text": "x" * 10**step}  # type: ignore[assignment]
            rank.save(step, state)
            rank.finish()
            assert same(load(tmp_path, step, blank(state)), state)


def test_a_file_is_written_in_the_background(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    called: list[str] = []
    obj: dict[str, Any] = {"a": torch.randn(100, 10), "name": "x", "list": [torch.ones(3)]}
    expected = copy.deepcopy(obj)
    files = FileSaver()
    files.schedule(obj, path, finalize=(partial(called.append, "durable"),))
    obj["a"].zero_()
    assert files.unfinished == 1
    assert files.maybe_finalize(blocking=True, within_s=40) == [1]
    assert called == ["durable"]
    assert same(torch.load(path, weights_only=True)["a"], expected["a"])
    assert [one.name for one in tmp_path.iterdir()] == ["model.pt"]
    files.schedule(expected, path)
    files.close()
    assert same(torch.load(path, weights_only=True)["a"], expected["a"])


def test_finalize_hooks_are_called_in_order_when_a_save_is_durable(tmp_path: Path) -> None:
    called: list[int] = []
    with saving(tmp_path, buffers=2) as rank:
        for step in (1, 2):

            def note(step: int = step) -> None:
                assert path_of(tmp_path, step).exists()
                called.append(step)

            rank.save(step, {"a": torch.ones(5)}, finalize=(note,))
        assert rank.queue.unfinished == 2
        assert rank.finish() == [1, 2]
    assert called == [1, 2]
    assert rank.queue.unfinished == 0


def test_a_hook_that_fails_keeps_no_other_from_being_called_at_the_end(tmp_path: Path) -> None:
    called: list[int] = []

    def fail() -> None:
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"), Checkpointer(tmp_path, in_flight=2) as saves:
        saves.save(1, {"a": torch.ones(5)}, finalize=(fail,))
        saves.save(2, {"a": torch.ones(5)}, wait=True, finalize=(lambda: called.append(2),))
    assert called == [2]
    assert saves.unfinished == 0
    assert saves._saver._stager._thread is None, "and nothing is left of it"


def test_a_plan_is_made_anew_when_the_bytes_of_a_tensor_lie_otherwise(tmp_path: Path) -> None:
    plain = torch.randn(100, dtype=torch.complex64)
    sparse = torch.eye(10).to_sparse()
    with saving(tmp_path, on_error="fatal") as rank:
        rank.save(1, {"a": plain, "b": torch.zeros(10, 10)})
        rank.save(2, {"a": plain.conj(), "b": torch.zeros(10, 10)}, wait=True)
        rank.save(3, {"a": plain, "b": sparse}, wait=True)
        assert rank.finish() == [1, 2, 3]
    found = load(tmp_path, 2, {"a": torch.zeros_like(plain)})
    assert same(found, {"a": plain.conj().resolve_conj()})
    assert same(load(tmp_path, 3, {"a": torch.zeros_like(plain)}), {"a": plain})


def _in_memory(step: int) -> SaveRequest:
    return SaveRequest(step=step, to_root=False)


def _noted(plain: Any, order: list[str], what: str) -> Any:
    def noted(*arguments: Any, **named: Any) -> Any:
        order.append(what)
        return plain(*arguments, **named)

    return noted


def _remove(folder: Path) -> None:
    for one in folder.iterdir():
        os.unlink(one)
    folder.rmdir()
