"""Values and `.metadata` of a checkpoint are data: their bytes call, import and change nothing."""

# ruff: noqa: E501 - tables

import io
import json
import pickle
import pickletools
import random
import subprocess
import sys
from pathlib import PurePosixPath
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.msgpack import Ext
from torch.distributed.checkpoint import filesystem, metadata

from tests.checkpoint_helpers.fuzzed_values import by_torch, described, with_pickle
from tests.integration.checkpoints.test_values import READ, likeness
from trainer_sdk.checkpoint.restore.errors import UnfitError
from trainer_sdk.checkpoint.restore.torch_metadata import read_metadata
from trainer_sdk.checkpoint.restore.values import as_bytes, harmless, read_value
from trainer_sdk.checkpoint.storage.pickle_data import MOST_DEPTH, UnreadableBytesError
from trainer_sdk.checkpoint.storage.pickled_values import descriptions_in, why_unread
from trainer_sdk.checkpoint.storage.value_archive import KINDS as NAMES
from trainer_sdk.checkpoint.storage.value_archive import Made, ValueArchive, with_record
from trainer_sdk.checkpoint.value_kinds import CONTAINERS, KINDS

OBJECTS = (
    b"cnumpy\ndtype\n(X\x02\x00\x00\x00O8I00\nI01\ntR(I3\nX\x01\x00\x00\x00|NNNI-1\nI-1\nI0\ntb"
)
ENCODED = b"c_codecs\nencode\n(X\x08\x00\x00\x00AAAAAAAAX\x06\x00\x00\x00latin1tR"
POINTERS = (
    b"\x80\x02cnumpy._core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(I0\nt" + ENCODED + b"tR"
    b"(I1\n(I1\nt" + OBJECTS + b"I00\n" + ENCODED + b"tb."
)
HOSTILE = {
    "pointers in an array of objects": (POINTERS, "a part is of type bytes"),
    "an object of pointers": (
        b"\x80\x02cnumpy._core.multiarray\nscalar\n(" + OBJECTS + ENCODED + b"tR.",
        "a part is of type bytes",
    ),
    "gigabytes of zeros": (b"\x80\x02cbuiltins\nbytes\n(L6000000000L\ntR.", "of type int"),
    "a fraction with an exponent": (
        b"\x80\x02cfractions\nFraction\n(X\x0a\x00\x00\x001e20000000tR.",
        "a fraction is not of digits",
    ),
    "a class that is changed": (
        b"\x80\x04cpathlib\nPurePosixPath\n}X\x0b\x00\x00\x00__truediv__K\x01sb.",
        "it sets attributes of something that has none",
    ),
    "a method": (b"\x80\x04\x8c\x07pathlib\x8c\x19PurePosixPath.__truediv__\x93.", "it is, or has"),
    "a call of the system": (b"\x80\x02cos\nsystem\n(X\x02\x00\x00\x00lstR.", "has in it, os.system"),
    "a call of what is data": (b"\x80\x02X\x01\x00\x00\x00a)R.", "it calls what has no name"),
    "an instance": (b"\x80\x02(cuuid\nUUID\no.", "it has the opcode OBJ"),
    "an extension": (b"\x80\x02\x82\x01.", "it has the opcode EXT1"),
    "a class as a value": (b"\x80\x02cnumpy\nndarray\n.", "cannot be made"),
    "an id of a float": (b"\x80\x02cuuid\nUUID\n)\x81}X\x03\x00\x00\x00intG?\xf0\0\0\0\0\0\0sb.", "of type float"),
    "a list in itself": (b"\x80\x02]q\x00h\x00a.", f"nested more than {MOST_DEPTH} deep"),
    "a list of lists of lists": (
        b"\x80\x02]q\x00" + b"".join(b"](" + b"h%c" % n * 99 + b"eq%c" % (n + 1) for n in range(9)) + b".",
        "more parts than a value of its size may have",
    ),
    "a memo at two thousand million": (b"\x80\x02Nr\xff\xff\xff\x7f.", ""),
    "nothing": (b"", "it is not a pickle"),
    "no end": (b"\x80\x02N", "it is not a pickle"),
    "a storage that is not there": (
        b"\x80\x02(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x05\x00\x00\x00../..X\x03\x00\x00\x00cpuK\x01tQ.",
        "it has no file data/../..",
    ),
}  # fmt: skip
OUTSIDE_ITS_STORAGE = {"size": (3,), "stride": (2**61,), "offset": 2}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_pickle_is_refused(name: str) -> None:
    """B1: an array of pointers was a crash at its first use; a path's method stayed changed."""
    pickled, reason = HOSTILE[name]
    before = dict(vars(PurePosixPath))
    if not reason:
        assert read_value(with_pickle(pickled), "x") is None
        return
    with pytest.raises(UnfitError) as refused:
        read_value(with_pickle(pickled), "x")
    assert reason in str(refused.value)
    assert "\n" not in str(refused.value)
    with pytest.raises(UnfitError):
        read_metadata(pickled, ".metadata")
    assert dict(vars(PurePosixPath)) == before


@pytest.mark.parametrize("changed", OUTSIDE_ITS_STORAGE)
def test_a_tensor_is_within_its_storage(changed: str) -> None:
    at: dict[str, Any] = {
        "offset": 0,
        "size": (2,),
        "stride": (1,),
        changed: OUTSIDE_ITS_STORAGE[changed],
    }
    tensor = torch.ones(2)

    class Forged(torch.Tensor):
        def __reduce_ex__(self, protocol: Any) -> Any:
            del protocol
            storage: Any = tensor._typed_storage()  # type: ignore[no-untyped-call]
            args: Any = (storage, at["offset"], at["size"], at["stride"], False, {})
            return torch._utils._rebuild_tensor_v2, args

    with pytest.raises(UnfitError, match="a tensor is larger than its storage"):
        read_value(by_torch((Forged(tensor),)), "x")


def test_indices_of_a_sparse_tensor_are_within_its_shape() -> None:
    items = ValueArchive(as_bytes((torch.eye(3).to_sparse(),), "x")).items()
    assert items is not None
    shape = max(n for n, item in enumerate(items) if item == Made("tuple", 2))
    forged = [*items[: shape - 2], 1, 1, *items[shape:]]
    with pytest.raises(UnfitError, match="sparse cannot be made: size is inconsistent"):
        read_value(with_record(by_torch((torch.eye(3).to_sparse(),)), forged), "x")


RECORDS: dict[str, tuple[list[Any], str]] = {
    "a class": ([1, Made("os.system", 1)], "it is, or has in it, os.system"),
    "too few parts": ([1, Made("tuple", 2)], "less parts than it counts"),
    "less than none": ([1, Made("tuple", -1)], "less parts than it counts"),
    "two values": ([1, 2], "makes 2 values"),
    "a tower": ([None, *[Made("tuple", 1)] * 1000], "nested more than"),
    "bytes outside": ([1 << 40, 1 << 40, Made("stored", 2)], "refers to bytes outside"),
    "copies": ([*[0, 1000, Made("stored", 2)] * 9999, Made("list", 9999)], "asks for more memory"),
    "pointers": (
        ["|O", Made("numpy.dtype", 1), 1, Made("tuple", 1), "C", Ext(1, bytes(8)), Made("numpy.ndarray", 4)],
        "a part is of type bytes",
    ),
    "a type that numpy evaluates": (["(2,)O,i4", Made("numpy.dtype", 1)], "which numpy has not|numpy has not"),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDS)
def test_a_hostile_record_is_refused(name: str) -> None:
    items, reason = RECORDS[name]
    with pytest.raises(UnfitError, match=reason):
        read_value(with_record(by_torch(0), items), "x")


def test_a_record_has_neither_nesting_nor_keys() -> None:
    for record in ([[[1]]], [{1: 2}], [b"raw", [1, 2, 3]]):
        octets = with_record(by_torch(0), record)  # type: ignore[arg-type]
        with pytest.raises(UnfitError, match="its record cannot be read"):
            read_value(octets, "x")


def test_what_a_record_can_make_is_known_without_torch() -> None:
    assert {*KINDS, *CONTAINERS, "stored"} == NAMES


def test_keys_that_collide_do_not_take_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hashes of -1 and -2 are equal, so all these tuples share one place in a set."""
    monkeypatch.setattr("trainer_sdk.checkpoint.storage.pickle_data._MOST_SECONDS", -1.0)
    keys = {tuple(random.Random(n).choices((-1, -2), k=30)) for n in range(200)}
    for octets in (by_torch((keys,)), as_bytes(keys, "x")):
        with pytest.raises(UnfitError, match="s to read"):
            read_value(octets, "x")


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_what_torch_has_pickled_is_read_bit_for_bit(protocol: int) -> None:
    """Checkpoints of earlier releases, and adopted ones, have no record."""
    for name, value in READ.items():
        octets = by_torch(value, protocol)
        assert likeness(read_value(octets, name)) == likeness(value), name
        assert why_unread(octets) == "", name


def test_torch_reads_what_has_a_record() -> None:
    for name, value in READ.items():
        octets = io.BytesIO(as_bytes(value, name))
        assert likeness(torch.load(octets, weights_only=False)) == likeness(value), name


def test_large_arrays_stand_in_the_bytes_once() -> None:
    array = np.random.default_rng(1).random(1 << 18)
    tensor = torch.rand(1 << 18)
    assert len(as_bytes({1: array}, "x")) < array.nbytes + 4096
    assert len(as_bytes((tensor,), "x")) < tensor.nbytes + 4096
    assert likeness(read_value(as_bytes({1: array}, "x"), "x")) == likeness({1: array})


def test_torchs_planner_gets_no_bytes_of_others() -> None:
    value = {"a": (1, np.float64(2))}
    ours = harmless(by_torch(value), "x")
    assert likeness(torch.load(io.BytesIO(ours), weights_only=False)) == likeness(value)
    with pytest.raises(UnfitError):
        harmless(with_pickle(POINTERS), "x")


def test_metadata_is_as_torch_reads_it() -> None:
    assert read_metadata(described(), "x") == pickle.loads(described())


def test_a_changed_function_in_metadata_is_refused() -> None:
    layout = b"ctorch.serialization\n_get_layout\n}X\x08\x00\x00\x00__code__K\x01sb0"
    with pytest.raises(UnfitError, match="it sets attributes"):
        read_metadata(described()[:2] + layout + described()[2:], "x")


def test_every_opcode_is_known_or_refused() -> None:
    """A later Python may have more of them."""
    for code in pickletools.opcodes:
        octets = with_pickle(b"\x80\x02" + code.code.encode("latin-1") + bytes(9) + b".")
        try:
            read_value(octets, "x")
        except UnfitError as error:
            assert str(error).startswith("x cannot be read: ")


def fuzz(inputs: int, seed: int) -> dict[str, int]:
    """The numbers of outcomes; the process has failed if any of them was another."""
    asked = ("--inputs", str(inputs), "--profiled", "200", "--seed", str(seed))
    done = subprocess.run(
        [sys.executable, "-m", "tests.checkpoint_helpers.fuzzed_values", *asked],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    outcomes: dict[str, int] = json.loads(done.stdout)
    return outcomes


def test_mutated_values_do_nothing_but_give_data() -> None:
    outcomes = fuzz(600, 1)
    assert min(outcomes.values()) > 0, outcomes
    assert outcomes["value read"] > 100


@pytest.mark.chaos
@pytest.mark.timeout(7200)
def test_a_million_mutated_values_do_nothing_but_give_data() -> None:
    assert sum(fuzz(1_000_000, 2).values()) > 1_000_000


def test_a_part_of_a_tensor_whose_name_is_a_list_is_refused() -> None:
    index = metadata.MetadataIndex("a")
    places = {index: filesystem._StorageInfo("x", 0, 9)}
    whole = metadata.Metadata({"a": metadata.BytesStorageMetadata()}, {}, places)
    object.__setattr__(index, "fqn", ["a"])
    with pytest.raises(UnreadableBytesError, match="not what torch writes: a part is of"):
        descriptions_in(pickle.dumps(whole))


def test_a_record_is_messagepack() -> None:
    assert msgspec.msgpack.decode(ValueArchive(as_bytes(7, "x")).file("everstep.msgpack")) == [7]
