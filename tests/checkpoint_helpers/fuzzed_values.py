"""Reads mutated values and `.metadata` of checkpoints, and watches what the reading does.

`python -m tests.checkpoint_helpers.fuzzed_values --inputs 1000000 --seed 1` prints what came of them. It ends with an
error if any input does anything but give data or `UnfitError`: an audit hook sees imports, files,
processes and unpickling, a profiler the calls (`--profiled` inputs of them), and the limits of the
process memory and time. Each value that was read is used.
"""

# ruff: noqa: E501 - tables

import argparse
import codecs
import collections
import copy
import datetime
import decimal
import fractions
import io
import os
import pathlib
import pickle
import pickletools
import random
import resource
import sys
import uuid
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from types import CodeType, FrameType
from typing import Any

import msgspec
import numpy as np
import torch
import torch._subclasses.schema_check_mode  # torch loads it when it first meets some tensors
from torch.distributed.checkpoint import filesystem, metadata

from trainer_sdk.checkpoint.restore.errors import UnfitError
from trainer_sdk.checkpoint.restore.torch_metadata import read_metadata
from trainer_sdk.checkpoint.restore.values import as_bytes, read_value
from trainer_sdk.checkpoint.storage.pickle_data import UnreadableBytesError
from trainer_sdk.checkpoint.storage.pickled_values import descriptions_in, why_unread

MEMORY_BYTES = 1 << 30
"""What all inputs together may take beyond the imports."""
_USED_ELEMENTS = 10_000
_PURE = (
    "<frozen",
    "collections",
    "codecs",
    "datetime.py",
    "enum.py",
    "encodings",
    "fractions.py",
    "io.py",
    "numbers.py",
    "pathlib.py",
    "pickle.py:decode_long",
    "pickletools.py",
    "re/__init__.py",
    "struct.py",
    "threading.py",
    "uuid.py",
    "zipfile.py",
    "dataclasses.py",
    "contextlib.py",
    "<string>",
)
_HARMLESS = frozenset({"builtins.id", "object.__getattr__", "sys._getframe", "sys.setprofile"})
_NAMES = (
    "os system", "builtins eval", "builtins exec", "builtins getattr", "builtins setattr", "posix system",
    "builtins bytes", "builtins bytearray", "builtins range", "builtins type", "numpy ndarray", "numpy dtype",
    "numpy._core.multiarray _reconstruct", "numpy._core.multiarray scalar", "fractions Fraction", "decimal Decimal",
    "uuid UUID", "pathlib PurePosixPath", "pathlib PurePosixPath.__truediv__", "torch Size", "torch device",
    "torch hub", "torch load", "torch._utils _rebuild_tensor_v2", "torch._utils _rebuild_qtensor", "torch LongStorage",
    "torch._utils _rebuild_sparse_tensor", "torch._tensor _rebuild_from_type_v2", "torch float64", "torch ops",
    "collections OrderedDict", "collections Counter", "datetime datetime", "subprocess Popen", "copyreg _reconstructor",
)  # fmt: skip
_OPCODES = [code.code.encode("latin-1") for code in pickletools.opcodes]


def by_torch(value: object, protocol: int = 2) -> bytes:
    """The output of `torch.save`."""
    octets = io.BytesIO()
    torch.save(value, octets, pickle_protocol=protocol)
    return octets.getvalue()


def with_pickle(pickled: bytes, like: bytes = b"") -> bytes:
    """An archive of torch with this pickle."""
    octets = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(like or by_torch(0))) as old,
        zipfile.ZipFile(octets, "w") as new,
    ):
        for name in old.namelist():
            content = pickled if name.endswith("/data.pkl") else old.read(name)
            new.writestr(zipfile.ZipInfo(name), content)
    return octets.getvalue()


def seeds() -> list[Any]:
    """Values of all kinds."""
    table = np.array([(1, 2.5, 3)], dtype=[("a", "i4"), ("b", "f8"), ("c", "M8[D]")])
    return [
        {"lr": 0.1, "betas": (0.9, 0.99), 3: [None, True, "é", b"\xff", -(2**300)]},
        [np.arange(6.0).reshape(2, 3).T, table, np.float32(1), np.array([1, "a", [2]], object)],
        (np.str_("é"), np.datetime64("2026-11-22", "ms"), np.zeros((0, 2), "S3"), np.dtype("f8")),
        (torch.ones(2, 3), torch.ones(3).to(torch.float8_e4m3fn), torch.tensor([1j]).conj()),
        (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.eye(2).to_sparse_csc()),
        (torch.nn.Parameter(torch.ones(2)), torch.zeros(0), torch.arange(6).view(2, 3).t()),
        (
            datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.UTC),
            datetime.time(1),
            uuid.UUID(int=7),
        ),
        (decimal.Decimal("0.1"), fractions.Fraction(1, 3), pathlib.PurePosixPath("a/b"), 1 - 2j),
        (collections.OrderedDict(a=1), collections.Counter("aab"), {1, 2}, frozenset({(1, 2)})),
        (range(3), slice(1, 2), bytearray(b"ab"), torch.Size([2]), torch.device("cpu"), torch.int8),
        random.Random(3).getstate(),
        np.random.default_rng(3).bit_generator.state,
    ]


def described() -> bytes:
    """A `.metadata` of torch."""
    size = torch.Size([4, 4])
    tensor = metadata.TensorStorageMetadata(
        metadata.TensorProperties(torch.float32),
        size,
        [metadata.ChunkStorageMetadata(torch.Size([0, 0]), size)],
    )
    places = {
        metadata.MetadataIndex("a", torch.Size([0, 0])): filesystem._StorageInfo("x", 0, 9),
        metadata.MetadataIndex("b"): filesystem._StorageInfo("x", 9, 9),
    }
    whole = metadata.Metadata(
        {"a": tensor, "b": metadata.BytesStorageMetadata()},
        {"a": ("a",), "b": ("b",)},
        places,
        metadata.StorageMeta(pathlib.PurePosixPath("/a/b")),
    )
    return pickle.dumps(whole)


class Mutator:
    """Mutates pickles by opcodes, records by items, and all by bytes."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        values = seeds()
        self._archives = [by_torch(value, protocol) for value in values for protocol in (2, 4)]
        self._records = [as_bytes(value, "x") for value in values]
        self._opcodes = [*map(_opcodes, map(_pickle_in, self._archives)), _opcodes(described())]
        self._pool = [code for codes in self._opcodes for code in codes]

    def inputs(self, count: int) -> Iterator[tuple[str, bytes]]:
        """So many inputs, each with the name of what reads it."""
        for _ in range(count):
            way = self._dice.random()
            if way < 0.6:
                number = self._dice.randrange(len(self._archives))
                mutated = self._mutated(self._opcodes[number])
                yield "value", with_pickle(mutated, self._archives[number])
            elif way < 0.8:
                yield "metadata", self._mutated(self._opcodes[-1])
            elif way < 0.95:
                yield "value", self._flipped(self._dice.choice(self._records), 3)
            else:
                yield "value", self._flipped(self._dice.choice(self._archives), 3)

    def _mutated(self, codes: list[bytes]) -> bytes:
        dice, codes = self._dice, list(codes)
        for _ in range(dice.choice((1, 1, 2, 3, 8))):
            at = dice.randrange(len(codes))
            end = at + dice.choice((0, 1, 1, 3))
            codes[at:end] = dice.choice(
                (
                    [],
                    [dice.choice(codes)],
                    [dice.choice(self._pool)],
                    [f"c{dice.choice(_NAMES).replace(' ', chr(10))}\n".encode()],
                    [
                        dice.choice(
                            (b"R", b"b", b"\x81", b"\x92", b"Q", b"0", b"2", b"(", b"u", b"e")
                        )
                    ],
                    [self._flipped(codes[at], 1)],
                    [dice.choice(_OPCODES) + dice.randbytes(dice.randrange(6))],
                    [b"\x8a\x08" + dice.randbytes(7) + b"\0"],
                )
            )
            codes = codes or [b"."]
        return b"".join(codes)

    def _flipped(self, octets: bytes, most: int) -> bytes:
        changed = bytearray(octets)
        for _ in range(self._dice.randrange(1, most + 1)):
            if changed:
                changed[self._dice.randrange(len(changed))] = self._dice.randrange(256)
        return bytes(changed)


def _pickle_in(archive: bytes) -> bytes:
    with zipfile.ZipFile(io.BytesIO(archive)) as file:
        return file.read(next(name for name in file.namelist() if name.endswith("/data.pkl")))


def _opcodes(pickled: bytes) -> list[bytes]:
    places = [at for _, _, at in pickletools.genops(pickled)] + [len(pickled)]
    return [pickled[at:end] for at, end in pairwise(places) if at is not None and end]


class Watch:
    """Sees what the reading of an input does."""

    def __init__(self) -> None:
        self.is_reading = False
        self.seen: set[str] = set()
        self.files: set[str] = set()
        self._before = _attributes()
        sys.addaudithook(self._audited)

    def _audited(self, event: str, args: tuple[Any, ...]) -> None:
        if self.is_reading and event not in _HARMLESS:
            self.seen.add(f"{event} {args[:1]!r}"[:200])

    def profiled(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note the file of a function of Python that is called, and the name of one in C."""
        if event == "call":
            self.files.add(_file_of(frame.f_code))

    def check(self) -> None:
        """AssertionError if anything but reading has happened."""
        assert not self.seen, sorted(self.seen)
        foreign = {file for file in self.files if not _is_expected(file)}
        assert not foreign, sorted(foreign)
        assert _attributes() == self._before


def _file_of(code: CodeType) -> str:
    return f"{code.co_filename}:{code.co_name}"


def _is_expected(file: str) -> bool:
    ours = (
        "trainer_sdk/checkpoint/",
        "trainer_sdk/bootstrap/garbage_collection.py",
        "tests/checkpoint_helpers/fuzzed_values.py",
    )
    if any(part in file for part in (*ours, *_PURE)):
        return True
    return "site-packages/torch/" in file or "site-packages/numpy/" in file


def _attributes() -> list[tuple[str, list[tuple[str, int]]]]:
    """The attributes of whatever a pickle may name here."""
    classes: list[Any] = [
        pathlib.PurePosixPath, pathlib.PosixPath, uuid.UUID, fractions.Fraction, collections.OrderedDict,
        torch.Tensor, torch.nn.Parameter, metadata.Metadata, metadata.MetadataIndex, metadata.TensorProperties,
        metadata.TensorStorageMetadata, metadata.BytesStorageMetadata, filesystem._StorageInfo, metadata.StorageMeta,
        torch._utils._rebuild_tensor_v2, torch.serialization._get_layout, pathlib.PurePosixPath.__truediv__,
    ]  # fmt: skip
    return [(repr(kind), sorted((k, id(v)) for k, v in vars(kind).items())) for kind in classes]


def use(value: Any) -> None:
    """Touch all that is in a value: what is not sound crashes here."""
    if isinstance(value, torch.Tensor):
        if value.numel() <= _USED_ELEMENTS and value.device.type == "cpu":
            dense = value.dequantize() if value.is_quantized else value
            dense = dense if dense.layout == torch.strided else dense.to_dense()
            dense.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(
                torch.uint8
            ).sum()
    elif isinstance(value, np.ndarray):
        with suppress(ValueError):  # a time without a unit has no text
            assert value.size > _USED_ELEMENTS or repr(value.tolist()) is not None
    elif isinstance(value, dict):
        for key, member in value.items():
            hash(key)
            use(member)
    elif isinstance(value, (list, tuple, set, frozenset)):
        for member in value:
            use(member)
    else:
        with suppress(ValueError):
            repr(copy.copy(value))


def run(inputs: Iterator[tuple[str, bytes]], profiled: int) -> collections.Counter[str]:
    """Read the inputs; returns the number of each outcome."""
    read: dict[str, Callable[[bytes], Any]] = {
        "value": lambda octets: read_value(octets, "x"),
        "metadata": lambda octets: read_metadata(octets, "x"),
    }
    for value in seeds():
        use(read_value(by_torch(value), "x"))
        use(read_value(as_bytes(value, "x"), "x"))
    read_metadata(described(), "x")
    watch, outcomes = Watch(), collections.Counter[str]()
    for number, (kind, octets) in enumerate(inputs):
        watch.is_reading = True
        sys.setprofile(watch.profiled if number < profiled else None)
        try:
            made = read[kind](octets)
        except UnfitError:
            made, outcome = None, "refused"
        else:
            outcome = "read"
        finally:
            sys.setprofile(None)
            watch.is_reading = False
        outcomes[f"{kind} {outcome}"] += 1
        if kind == "metadata":
            _list_values(octets)
        elif outcome == "read":
            use(made)
        else:
            why_unread(octets)
        if not number % 1000:
            watch.check()
    watch.check()
    return outcomes


def _list_values(octets: bytes) -> None:
    with suppress(UnreadableBytesError):
        descriptions_in(octets)


def main() -> None:
    """Run by arguments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--inputs", type=int, default=10_000)
    parser.add_argument("--profiled", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    codecs.lookup("raw_unicode_escape")  # Python loads it when it first needs it
    torch.set_num_threads(1)
    taken = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * os.sysconf(
        "SC_PAGE_SIZE"
    )
    resource.setrlimit(resource.RLIMIT_AS, (taken + MEMORY_BYTES,) * 2)
    outcomes = run(Mutator(asked.seed).inputs(asked.inputs), asked.profiled)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(msgspec.json.encode({**outcomes, "peak_mib": peak}).decode())


if __name__ == "__main__":
    main()
