"""A state of thousands of small tensors: restored bit for bit, and no more files or requests."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint_helpers.saved_by import load, manifest_of, path_of, same, saving
from tests.contract.s3_server import BUCKET, s3_server
from tests.unit.trainer_sdk.checkpoint.saved_states import together
from tests.variants import variant
from trainer_sdk import testing
from trainer_sdk.checkpoint import Checkpointer, FileSaver
from trainer_sdk.checkpoint.rank_group import RankGroup

MANY, FEW = 5000, 50
DTYPES = (
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
    torch.complex64,
)
SHAPES = ((), (0,), (1,), (7,), (3, 5), (2, 0, 3), (2, 3, 4), (64,), (33, 17), (1, 1, 1, 9))
VALUES = (3, 0.5, "text", b"\0octets", None, [1, 2], (1, {"a": "dict"}), -1)
State = dict[str, Any]


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with testing.watched():
        yield


def tensor(number: int, *, is_blank: bool) -> torch.Tensor:
    """All bits of it are random, also those of numbers that are none."""
    dtype, shape = DTYPES[number % len(DTYPES)], SHAPES[number // len(DTYPES) % len(SHAPES)]
    size, most = math.prod(shape) * dtype.itemsize, 2 if dtype is torch.bool else 256
    if not size:
        return torch.empty(shape, dtype=dtype)
    random = torch.Generator().manual_seed(number)
    octets = torch.randint(0, most, (size,), dtype=torch.uint8, generator=random)
    return (torch.zeros_like(octets) if is_blank else octets).view(dtype).view(shape)


def state(count: int, *, is_blank: bool = False) -> State:
    """`count` tensors in a tree of dictionaries and lists, and a value for each ten of them."""
    tensors = iter([tensor(number, is_blank=is_blank) for number in range(count)])

    def layer(number: int) -> State:
        return {
            "weights": [next(tensors) for _ in range(4)],
            "experts": {f"{one}": {"in": next(tensors), "out": [next(tensors)]} for one in (0, 1)},
            "of": None if is_blank else VALUES[number % len(VALUES)],
            "scale": next(tensors),
            "offset": next(tensors),
        }

    return {"layers": [layer(number) for number in range(count // 10)], "count": count}


def test_the_state_has_as_many_tensors_of_all_kinds() -> None:
    found = [*_tensors(state(MANY))]
    assert len(found) == MANY
    assert len({(one.dtype, one.shape) for one in found}) == len(DTYPES) * len(SHAPES)
    assert not same(state(FEW), state(FEW, is_blank=True))


@pytest.mark.parametrize("tier", [variant("memory"), "global"])
def test_they_are_restored_bit_for_bit_from_each_tier(tmp_path: Path, tier: str) -> None:
    keeps, saved = tier == "memory", state(MANY)
    first = Checkpointer(tmp_path / "root", on_error="fatal", keep_memory=keeps)
    for step in (1, 2):
        assert first.save(step, saved, wait=True).durable
    first._close(abort=False, is_failing=True)
    live = state(MANY, is_blank=True)
    with Checkpointer(tmp_path / "root", on_error="fatal", keep_memory=keeps) as second:
        found = second.restore(live)
        assert found is not None
        assert (found.step, found.tier) == (2, tier)
        assert same(live, saved)
        assert second.save(3, live, wait=True).durable
    assert files_of(tmp_path, 3) == files_of(tmp_path, 1)


def test_torch_alone_reads_them(tmp_path: Path) -> None:
    with saving(tmp_path, on_error="fatal") as rank:
        rank.save(1, state(MANY))
        assert rank.finish() == [1]
    assert same(load(tmp_path, 1, state(MANY, is_blank=True)), state(MANY))


@pytest.mark.variant
def test_two_ranks_share_them(tmp_path: Path) -> None:
    """Half of them are written by each: what both have is written once."""

    def one(group: RankGroup) -> list[int]:
        with saving(tmp_path, group, on_error="fatal") as rank:
            rank.save(1, state(MANY) | {f"own{group.rank}": tensor(group.rank, is_blank=False)})
            return rank.finish()

    assert together(2, one) == [[1], [1]]
    sizes = [one.size_bytes for one in manifest_of(tmp_path, 1).files if "distcp" in one.name]
    assert len(sizes) == 2
    assert min(sizes) > sum(sizes) / 3
    assert same(load(tmp_path, 1, state(MANY, is_blank=True)), state(MANY))


def test_a_file_of_them_is_what_torch_reads(tmp_path: Path) -> None:
    saves = FileSaver(on_error="fatal")
    saves.schedule(state(MANY), tmp_path / "state.pt")
    saves.close()
    assert same(torch.load(tmp_path / "state.pt", weights_only=True), state(MANY))


def test_files_and_requests_do_not_grow_with_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the server of an object store, whose log has each request."""
    made: dict[int, dict[str, int]] = {}
    with s3_server(tmp_path) as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        for count in (FEW, MANY):
            root, live = f"s3://{BUCKET}/{count}", state(count, is_blank=True)
            with Checkpointer(root, on_error="fatal") as first:
                assert first.save(1, state(count), wait=True).durable
            saved = len(requests(tmp_path, count))
            with Checkpointer(root, on_error="fatal") as second:
                assert second.restore(live) is not None
            assert same(live, state(count))
            written = {one for one in requests(tmp_path, count) if one.startswith("PUT")}
            made[count] = {
                "objects": len(written),
                "to save": saved,
                "to restore": len(requests(tmp_path, count)) - saved,
            }
    assert made[MANY] == made[FEW]
    assert max(made[MANY].values()) < 50


def requests(folder: Path, count: int) -> list[str]:
    """Those about one root, as moto's server has logged them: a method and a path each."""
    found = re.findall(r'"([A-Z]+ \S+) HTTP', (folder / "log").read_text())
    return [one for one in found if f"/{BUCKET}/{count}/" in one or f"prefix={count}%2F" in one]


def files_of(folder: Path, step: int) -> set[str]:
    return {one.name for one in path_of(folder, step).iterdir()}


def _tensors(found: Any) -> Iterator[torch.Tensor]:
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, (dict, list)):
        for one in found.values() if isinstance(found, dict) else found:
            yield from _tensors(one)
