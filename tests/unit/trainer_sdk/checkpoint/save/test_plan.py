"""All ranks make the same plan, with each tensor once, and readable by torch."""

import io
import pickle
from typing import Any

import msgspec
import pytest
import torch

from tests.unit.trainer_sdk.checkpoint.saved_states import together
from trainer_sdk.checkpoint.flat_state import fits, flatten, read_form, room_for
from trainer_sdk.checkpoint.manifest import ImageEntry
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.save.description import PlanError
from trainer_sdk.checkpoint.save.plan import PAGE_BYTES, Plan, layout_of, make_plan
from trainer_sdk.checkpoint.torch_format import around, inside

SHAPES = [(), (0,), (1,), (7, 3), (0, 4), (65,), (1024, 3)]
DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int8, torch.complex128]


def plan_of(
    state: dict[str, Any], group: RankGroup | None = None, *, with_all: bool = False
) -> Plan:
    return make_plan(flatten(state), group or RankGroup(None), "mark", with_all=with_all)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_tensor_has_torchs_bytes_around_it(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.randint(0, 2, shape).to(dtype)
    head, tail = around(dtype, shape)
    assert len(head) % 64 == 0 or not tensor.nbytes, "its data is aligned"
    octets = head + tensor.reshape(-1).view(torch.uint8).numpy().tobytes() + tail
    found = torch.load(io.BytesIO(octets), weights_only=True)
    assert found.dtype == dtype
    assert torch.equal(found, tensor)
    copied = inside(memoryview(octets + bytes(64)), dtype, shape)
    assert copied is not None
    assert (copied.dtype, copied.shape) == (dtype, shape)
    assert torch.equal(copied, tensor)


@pytest.mark.parametrize(
    "form", [(torch.float32, (6,)), (torch.float32, (2, 4)), (torch.int32, (2, 3))]
)
def test_a_tensor_in_another_form_is_left_to_torch(form: tuple[torch.dtype, Any]) -> None:
    head, tail = around(torch.float32, (2, 3))
    octets = head + bytes(24) + tail
    assert inside(memoryview(octets), torch.float32, (2, 3)) is not None
    assert inside(memoryview(octets), *form) is None
    assert inside(memoryview(octets)[:-1], torch.float32, (2, 3)) is None
    by_torch = io.BytesIO()
    torch.save(torch.ones(2, 3), by_torch)  # with a checksum
    assert inside(by_torch.getbuffer(), torch.float32, (2, 3)) is None


@pytest.mark.parametrize("size", [1, 600, 5000, 8000, 12_000, 1 << 16, 10 << 20])
def test_a_value_is_found_wherever_it_ends_in_its_space(size: int) -> None:
    saved = io.BytesIO()
    torch.save("x" * size, saved)
    octets = saved.getvalue()
    room = room_for(len(octets))
    assert fits(len(octets), room)
    assert not fits(room + 1, room)
    slacks = [one for one in range(40_000) if fits(len(octets), len(octets) + one)]
    for slack in (slacks[0], slacks[len(slacks) // 2], slacks[-1]):
        padded = io.BytesIO(octets + bytes(slack))
        assert torch.load(padded, weights_only=True) == "x" * size


def test_pieces_do_not_overlap_and_fill_whole_pages() -> None:
    state = {f"t{one}": torch.ones(one) for one in range(40)} | {"value": "x" * 999}
    plan = plan_of(state)
    at = 0
    for one in plan.placed:
        assert one.offset - len(one.head) == at
        at = one.offset + one.length + len(one.tail)
    assert plan.file_bytes % PAGE_BYTES == 0
    assert at <= plan.file_bytes < at + PAGE_BYTES


def test_ranks_plan_alike_and_each_tensor_is_written_once() -> None:
    def one(group: RankGroup) -> Plan:
        shared = {f"w{number}": torch.ones(100 + number) for number in range(10)}
        return plan_of({**shared, f"own{group.rank}": torch.ones(3)}, group)

    plans = together(3, one)
    written = [plan.local.pieces[one.number].key for plan in plans for one in plan.placed]
    assert sorted(written) == sorted([f"w{one}" for one in range(10)] + ["own0", "own1", "own2"])
    assert len({plan.layout for plan in plans}) == 1
    metadata = pickle.loads(plans[0].metadata)
    assert len(metadata.storage_data) == 13
    assert not plans[1].metadata


def test_an_image_with_all_pieces_has_them_after_the_file() -> None:
    def one(group: RankGroup) -> Plan:
        return plan_of({f"w{number}": torch.ones(9) for number in range(4)}, group, with_all=True)

    for plan in together(2, one):
        entries = msgspec.json.decode(plan.entries, type=tuple[ImageEntry, ...])
        assert {one.key for one in entries} == {"w0", "w1", "w2", "w3"}
        assert sum(one.offset >= plan.file_bytes for one in entries) == 2
        assert plan.image_bytes > plan.file_bytes


@pytest.mark.parametrize("bad", [{"it": lambda: None}, {"\ud800": 1}, {"\ud800": torch.ones(2)}])
def test_all_ranks_learn_that_one_cannot_save(bad: dict[str, Any]) -> None:
    def one(group: RankGroup) -> str:
        try:
            plan_of(bad if group.rank else {"it": 1}, group)
        except PlanError as error:
            return str(error)
        return ""

    said = together(2, one)
    assert said[0] == said[1]
    assert said[0].startswith("rank 1 has a state that cannot be saved")


def test_the_layout_changes_with_shape_dtype_key_and_rank_and_not_with_values() -> None:
    def layout(*ranks: dict[str, Any]) -> str:
        return layout_of([read_form(flatten(one)).pieces for one in ranks])

    known = layout({"a": torch.ones(3), "v": 1})
    assert layout({"a": torch.zeros(3), "v": "other", "more": 2}) == known
    others = [
        layout({"a": torch.ones(4)}),
        layout({"a": torch.ones(3, dtype=torch.float64)}),
        layout({"b": torch.ones(3)}),
        layout({"a": torch.ones(3)}, {"a": torch.ones(3)}),
    ]
    assert len({known, *others}) == 5


def test_the_fingerprint_changes_when_the_plan_must() -> None:
    def fingerprint(state: dict[str, Any]) -> object:
        return flatten(state).fingerprint

    known = fingerprint({"a": torch.ones(3), "v": 1})
    assert fingerprint({"a": torch.zeros(3), "v": 2}) == known
    assert fingerprint({"a": torch.ones(4), "v": 1}) != known
    assert fingerprint({"a": torch.ones(3).half(), "v": 1}) != known
    assert fingerprint({"a": torch.ones(3), "w": 1}) != known
    assert fingerprint({"a": torch.ones(3), "v": torch.ones(1)}) != known
