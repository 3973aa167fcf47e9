"""What a save takes is restored bit for bit; what would not be, the first save refuses."""

# ruff: noqa: E501, DTZ001 - two tables of values

import collections
import dataclasses
import enum
import math
import pickle
import random
import uuid
from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep_services.cli.__main__ import main
from tests.checkpoint_helpers.fuzzed_values import by_torch
from tests.checkpoint_helpers.saved_by import WITHIN_S, saving
from tests.unit.trainer_sdk.checkpoint.saved_states import Place
from trainer_sdk import testing
from trainer_sdk.checkpoint import Checkpointer, SaveError
from trainer_sdk.checkpoint.restore.errors import UnfitError
from trainer_sdk.checkpoint.restore.values import read_value
from trainer_sdk.checkpoint.storage import storage_for
from trainer_sdk.checkpoint.storage.checkpoints import look, verify
from trainer_sdk.checkpoint.storage.pickled_values import why_unread

State = dict[str, Any]


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    HIGH = 2


@dataclasses.dataclass
class Best:
    loss: float = 0.5


Pair = collections.namedtuple("Pair", "one other")

READ: State = {
    "float64": np.float64(0.1), "float32": np.float32(0.1), "int8": np.int8(-3), "half": np.float16(2),
    "bool": np.bool_(True), "str": np.str_("é"), "bytes": np.bytes_(b"\0x"), "when": np.datetime64("2026-11-22"),
    "array": np.arange(6.0).reshape(2, 3).T, "empty": np.zeros((0, 3), np.int16), "objects": np.array([1, "a", None], object),
    "record": np.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]), "legacy": np.random.RandomState(3).get_state(),
    "generator": np.random.default_rng(3).bit_generator.state, "mersenne": np.random.Generator(np.random.MT19937(3)).bit_generator.state,
    "python": random.Random(3).getstate(), "torch": torch.get_rng_state(), "datetime": datetime(2026, 11, 22, 7, 1, 2, 3),
    "aware": datetime(2026, 11, 22, tzinfo=UTC), "date": date(2026, 11, 22), "span": timedelta(1, 2, 3),
    "path": Path("/a/b"), "pure": PurePosixPath("a"), "set": {1, "a"}, "frozen": frozenset({(1, 2)}), "raw": b"a\0\xff",
    "array of bytes": bytearray(b"\0a"), "complex": 1 - 2j, "ordered": (collections.OrderedDict(b=1, a=2),),
    "counter": (collections.Counter("abca"),), "size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cpu"),
    "layout": torch.strided, "none": None, "fraction": Fraction(1, 3), "decimal": Decimal("0.1"), "large": -(2**1999),
    "nan": math.nan, "infinite": -math.inf, "negative zero": -0.0, "range": range(1, 9, 2), "slice": slice(1, None),
    "id": uuid.UUID(int=7), "tuple": (1, [2, {"a": (3.5, torch.ones(2))}]), "surrogate": "\ud800", "list": [1, "a", [None]],
    "sparse": torch.eye(3).to_sparse(), "conjugate": torch.tensor([1 + 2j]).conj(), "float8": torch.ones(3).to(torch.float8_e4m3fn),
    "scalar": torch.tensor(7), "no elements": torch.empty(0, 3), "parameter": torch.nn.Parameter(torch.ones(2)),
    "no bytes": b"", "deep": {"a": {"b": [torch.ones(1), {"c": np.float64(1)}]}},
}  # fmt: skip
JAGGED = torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged)
REFUSED: dict[str, tuple[Any, str]] = {
    "enum": (Colour.RED, "colour is of class tests.integration.checkpoints.test_values.Colour"),
    "int enum": (Level.HIGH, "save its .value"),
    "dataclass": ([1, Best()], r"it\[1\] is of class .*Best, .*: save dataclasses.asdict"),
    "named tuple": (Pair(1, 2), "save tuple"),
    "default": ((collections.defaultdict(list),), r"it\[0\] is of class collections.defaultdict"),
    "deque": ({"a": (1, collections.deque([1]))}, r"it\.a\[1\] is of class collections.deque"),
    "huge": (2**3000, "save str"),
    "module in a list": ([torch.nn.Linear(1, 1)], r"it\[0\] is of .*Linear.*: give it a name of its"),
    "module in a dict": ({"a": torch.nn.Linear(1, 1)}, r"it\.a|'a'"),
    "optimizer": ((torch.optim.SGD([torch.ones(1)]),), "SGD"),
    "function": (len, "builtin_function"),
    "class": (int, "of class type"),
    "generator": (torch.Generator(), "save its get_state"),
    "hidden": (np.array([Colour.RED], object), "of class numpy.ndarray"),
    "meta": (torch.empty(2, device="meta"), "it is of class torch.Tensor, .* on the meta device"),
    "jagged": (JAGGED, "it is of class .*NestedTensor, .*to_padded_tensor"),
    "unset": (torch.nn.UninitializedParameter(), "it is of class .*UninitializedParameter, which"),
    "opaque": (torch.ones(3).to_mkldnn(), r"it is of class torch.Tensor, .*to_dense\(\)"),
    "fold": (datetime(2026, 10, 25, 2, 30, fold=1), "save its timestamp"),
    "lambda": (lambda: 1, "of class function, which no restore would read"),
}  # fmt: skip


def blank(value: Any) -> Any:
    """Another value of the same form, as a script has it before a restore."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value.detach()) if value.layout == torch.strided else value * 0
    if isinstance(value, dict):
        return {key: blank(one) for key, one in value.items()}
    if isinstance(value, list):
        return [blank(one) for one in value]
    return None


def likeness(value: Any) -> Any:
    """The same for two values that are the same, bit for bit, and of the same types."""
    if isinstance(value, torch.Tensor):
        plain = value.detach()
        plain = (
            plain.to_dense() if plain.layout != torch.strided else plain.resolve_conj().contiguous()
        )
        return (
            "tensor",
            value.dtype,
            value.layout,
            value.shape,
            plain.view(-1).view(torch.uint8).tolist() if plain.numel() else [],
        )
    if isinstance(value, dict):
        return type(value), [(key, likeness(one)) for key, one in value.items()]
    if isinstance(value, (list, tuple)) and type(value) in (list, tuple):
        return type(value), [likeness(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(map(repr, value))
    if isinstance(value, np.ndarray):
        return (
            value.dtype,
            value.shape,
            value.tolist() if value.dtype == object else value.tobytes(),
        )
    return type(value), pickle.dumps(value, 4) if not isinstance(value, (slice, str)) else repr(
        value
    )


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    with testing.watched():
        yield


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("tier", ["memory", "global"])
def test_what_is_saved_is_restored_bit_for_bit_from_each_tier(tmp_path: Path, tier: str) -> None:
    keeps = tier == "memory"
    first = Checkpointer(tmp_path / "root", on_error="fatal", keep_memory=keeps)
    assert first.save(5, READ, wait=True).durable
    first._close(abort=False, is_failing=True)
    live = {key: blank(one) for key, one in READ.items() if tier == "memory" or key != "sparse"}
    with Checkpointer(tmp_path / "root", on_error="fatal", keep_memory=keeps) as second:
        found = second.restore(live, strict=False)
    assert found is not None
    assert (found.tier, found.kept) == (tier, ())
    for key, one in live.items():
        assert likeness(one) == likeness(READ[key]), key


class Open(torch.optim.SGD):
    """The form of its state is unknown before a step, which fails without gradients."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        raise RuntimeError("there is nothing to step")


class Overridden(Open):
    def load_state_dict(self, state_dict: State) -> None:
        super().load_state_dict(state_dict)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("is_blank", [True, False])
@pytest.mark.parametrize("kind", [Open, Overridden])
def test_values_in_an_optimizers_state_are_restored(
    tmp_path: Path, kind: type[Open], is_blank: bool
) -> None:
    """Torch's own load makes other values of texts, and fails at arrays."""
    values: State = {"text": "a", "nested": {"pair": (1, "x"), "list": ["b", [2, "c"]]}}
    values |= {"texts": {"d"}, "none": None, "octets": b"f", "tensor": torch.ones(2)}
    if kind is Open:
        values |= {"array": np.arange(3), "numbers": (range(3), "e")}

    def made(state: State | None) -> State:
        optimizer = kind([torch.nn.Parameter(torch.ones(2))], lr=0.1)
        if state is not None:
            optimizer.state[optimizer.param_groups[0]["params"][0]] = state
        return {"optimizer": optimizer}

    with Checkpointer(tmp_path / "root", job="own") as saves:
        assert saves.save(1, made(values)).wait(WITHIN_S)
    target = made(None if is_blank else values | {"text": "z", "tensor": torch.zeros(2)})
    with Checkpointer(tmp_path / "root", job="own") as saves:
        assert saves.restore(target) is not None
    (restored,) = target["optimizer"].state.values()
    assert likeness({name: restored[name] for name in values}) == likeness(values)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("tier", ["memory", "global"])
def test_quantized_tensors_are_restored_with_their_scales(tmp_path: Path, tier: str) -> None:
    values, scales = torch.arange(6.0).view(2, 3), torch.tensor([0.1, 0.2])

    def state(by: float) -> State:
        zeros = torch.tensor([1, 2])
        return {
            "whole": torch.quantize_per_tensor(values * by, 0.1 * by, 3, torch.quint8),
            "rows": torch.quantize_per_channel(values * by, scales * by, zeros, 0, torch.qint8),
        }

    live = state(0.5)
    with Checkpointer(tmp_path / "root", on_error="fatal", keep_memory=tier == "memory") as saves:
        saves.save(5, state(1), wait=True)
        found = saves.restore(live)
    assert found is not None
    assert found.tier == tier
    for key, right in state(1).items():
        assert torch.equal(live[key].int_repr(), right.int_repr())
        assert torch.equal(live[key].dequantize(), right.dequantize())


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_restore_would_read_is_refused_by_the_first_save(name: str, tmp_path: Path) -> None:
    value, said = REFUSED[name]
    said = said.replace("colour", "it")
    with saving(tmp_path, on_error="fatal", keeps=True, buffers=2) as rank:
        with pytest.raises(SaveError, match=said) as raised:
            rank.save(1, {"it": value, "a": torch.ones(2)})
        assert "\n" not in str(raised.value)
        assert not list((tmp_path / "root").glob("step-*"))
        assert rank.save(2, {"it": 1, "a": torch.ones(2)}) is not None
        with pytest.raises(SaveError, match=said):
            rank.save(3, {"it": value, "a": torch.ones(2)})
        assert rank.finish() == [1]


@pytest.mark.parametrize("name", [*READ, *(REFUSED.keys() - {"fold"})])
def test_what_is_told_by_names_is_what_a_restore_does(name: str) -> None:
    """`verify` has no torch."""
    value = READ[name] if name in READ else REFUSED[name][0]
    try:
        octets = by_torch(value)
    except Exception:
        pytest.skip("torch.save refuses it")
    try:
        read_value(octets, name)
    except UnfitError:
        assert why_unread(octets)
    else:
        assert why_unread(octets) == ""


def test_a_checkpoint_that_no_restore_reads_is_not_good(tmp_path: Path) -> None:
    """A8.1: one of a release that has not looked when it saved; retention keeps the one before."""
    place = Place(tmp_path)
    good = {"a": torch.ones(2), "loss": np.float64(0.5), "tensors": (torch.ones(2),)}
    place.publish(1, good)
    place.publish(2, good | {"colour": Colour.RED})
    storage = storage_for(str(place.root))
    verdicts = [verify(storage, one) for step in (1, 2) if (one := look(storage, step)) is not None]
    assert [one.is_good for one in verdicts] == [True, False]
    assert "colour of " in verdicts[1].flaw
    assert "cannot be restored: it is, or has in it, tests.integration" in verdicts[1].flaw


def test_cleaning_up_keeps_the_newest_that_a_restore_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A8.1: those after it are whole, and useless."""
    place = Place(tmp_path)
    for step in (1, 2, 3, 4):
        state: State = {"a": torch.ones(2)} | ({"it": Colour.RED} if step > 2 else {})
        place.publish(step, state)
    (place.root / "owner.json").write_text('{"job": "vit-l"}')
    assert main(["ckpt", "gc", str(place.root), "--keep-last", "1", "--delete"]) == 0
    capsys.readouterr()
    left = {one.name[-1] for one in place.root.glob("step-*")}
    assert "1" not in left
    assert "2" in left, "the newest good one"
    live: State = {"a": torch.zeros(2)}
    (found,) = place.restore({0: live}, 2)
    assert found is not None


numbers = st.one_of(st.integers(), st.floats(), st.booleans(), st.none(), st.complex_numbers())
leaves = st.one_of(
    numbers,
    st.text(max_size=4),
    st.binary(max_size=4),
    st.sampled_from(list(READ.values())),
    st.sampled_from([one for one, _ in REFUSED.values()]),
    st.floats(width=32).map(np.float32),
    st.lists(st.integers(-9, 9), max_size=3).map(np.array),
    st.lists(st.floats(), max_size=3).map(torch.tensor),
    st.datetimes(),
    st.fractions(),
)
names = st.text("abc", min_size=1, max_size=2)
trees = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(names, inner, max_size=3),
    ),
    max_leaves=6,
)


def test_a_state_is_refused_at_once_or_restored_as_it_was(tmp_path: Path) -> None:
    place = Place(tmp_path)
    with saving(tmp_path, on_error="fatal") as rank:
        step = 0

        @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
        @given(st.dictionaries(names, trees, max_size=3))
        def check(state: State) -> None:
            nonlocal step
            step += 1
            try:
                rank.save(step, state)
            except SaveError:
                return
            assert rank.queue.maybe_finalize(blocking=True, within_s=WITHIN_S)
            live = blank(state)
            if any(isinstance(one, torch.Tensor) and one.is_sparse for one in _leaves(state)):
                return  # read from images alone, as the guide says
            (found,) = place.restore({0: live}, step)
            assert found is not None
            assert likeness(live) == likeness(state)

        check()
        assert step > 30


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _leaves(one)
    else:
        yield value
