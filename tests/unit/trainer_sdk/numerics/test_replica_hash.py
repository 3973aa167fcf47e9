"""The hash of a tensor's bits."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.numerics.replica_hash import ReplicaHash, bits_sum

KINDS = [
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.bool,
]
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def tensor(kind: torch.dtype, count: int) -> torch.Tensor:
    made = torch.Generator().manual_seed(count)
    values = torch.randn(count, generator=made)
    return (values > 0) if kind == torch.bool else values.to(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 1, 7, 8, 33, 1000])
def test_it_does_not_depend_on_the_place_in_memory(kind: torch.dtype, count: int) -> None:
    values = tensor(kind, count)
    hashed = bits_sum(values).item()
    assert bits_sum(values.clone()).item() == hashed
    for offset in (1, 2, 3):
        larger = torch.zeros(count + offset, dtype=kind)
        larger[offset:] = values
        assert bits_sum(larger[offset:]).item() == hashed
    spread = torch.zeros(count, 3, dtype=kind)
    spread[:, 1] = values
    assert bits_sum(spread[:, 1]).item() == hashed
    if count % 8 == 0:
        assert bits_sum(values.view(8, -1).t().contiguous().t()).item() == hashed


@given(
    kind=st.sampled_from([kind for kind in KINDS if kind not in (torch.complex64, torch.bool)]),
    count=st.integers(1, 40),
    data=st.data(),
)
def test_each_bit_counts(kind: torch.dtype, count: int, data: st.DataObject) -> None:
    values = tensor(kind, count)
    before = bits_sum(values).item()
    size = values.element_size()
    bits = values.view(WORDS[size])
    at = data.draw(st.integers(0, count - 1))
    bit = data.draw(st.integers(0, 8 * size - 1))
    mask = torch.tensor(1 << bit if bit < 8 * size - 1 or size == 1 else -1 << bit)
    bits[at] ^= mask.to(bits.dtype)
    assert bits_sum(values).item() != before


@pytest.mark.parametrize("bit", [0, 30, 31])
@pytest.mark.parametrize("distance", [2, 64, 4096])
def test_a_pair_of_the_same_bits_counts(bit: int, distance: int) -> None:
    values = torch.zeros(20_000)
    values.view(torch.int32)[5] = 1 << 30 if bit == 30 else 1
    before = bits_sum(values).item()
    mask = torch.tensor(1 << bit if bit < 31 else -1 << bit, dtype=torch.int32)
    for at in (5, 5 + distance):  # where one bit falls, the other rises
        values.view(torch.int32)[at] ^= mask
    assert bits_sum(values).item() != before


def test_a_job_of_a_single_rank_has_no_replicas() -> None:
    module = torch.nn.Linear(3, 3)
    named = dict(module.named_parameters())
    replicas = ReplicaHash(named, ["all"], dict.fromkeys(named, 0), [module], RankGroup(None))
    assert not replicas.has_replicas
