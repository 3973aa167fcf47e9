"""Reads pickles as data, by an interpreter that imports, calls and changes nothing.

A pickle is a program: it may call any function that it names, and set attributes of what it made.
Here its opcodes only describe: a name is a `Name`, a call is a `DescribedCall` with its arguments,
a dictionary is `Pairs`. The reader of the description decides what each name means (`TreeBuilder`).
It is a tree: what occurs in two places is made twice, and nothing contains itself.
"""

import _compat_pickle
import io
import pickletools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

STORED = "a storage of torch"
"""The name of a call for something outside of the pickle: its arguments are the reference."""
NAMED = "a name"
"""The name of a call for a name that stands where a value does: its argument is the name."""
MOST_DEPTH = 200
_MOST_PARTS = 50_000_000
_MOST_SECONDS = 300.0
_PARTS_PER_BYTE, _SPARE_PARTS = 2, 10_000
_COPIES, _SPARE_BYTES = 4, 1 << 20
_MOST_INT_BITS = 1 << 16
_CHECKED_EVERY = 1024
_SCALARS = frozenset({int, float, str, bool, bytes, type(None)})


class UnreadableBytesError(Exception):
    """A restore refuses these bytes; the text says why."""


@dataclass(frozen=True, slots=True, eq=False)
class Name:
    """A name of Python, as `torch.float32`; nothing was imported."""

    text: str


@dataclass(slots=True, eq=False)
class DescribedCall:
    """A call that was not made."""

    name: str
    args: Sequence[object]
    state: object = None
    """What the pickle would set."""
    pairs: Sequence[object] = ()
    """What the pickle would put in: key, value, key, value."""


@dataclass(slots=True, eq=False)
class Pairs:
    """A dictionary."""

    pairs: list[object]
    """Key, value, key, value."""

    def fields(self) -> dict[str, Any]:
        """The values of the keys that are texts."""
        keys = self.pairs[::2]
        return {k: v for k, v in zip(keys, self.pairs[1::2], strict=True) if type(k) is str}


class ReadBudget:
    """What the reading of a value may take; `UnreadableBytesError` past it."""

    def __init__(self, parts: int = _MOST_PARTS, octets: int = 0) -> None:
        self._parts = min(parts, _MOST_PARTS)
        self._octets = octets
        self._deadline = time.monotonic() + _MOST_SECONDS
        self._unchecked = 0

    @classmethod
    def of(cls, size: int) -> "ReadBudget":
        """The budget for a value of this many bytes: what is in two places is made twice."""
        return cls(_PARTS_PER_BYTE * size + _SPARE_PARTS, _COPIES * size + _SPARE_BYTES)

    def spend(self, parts: int) -> None:
        """Count parts, and look at the clock from time to time."""
        self._parts -= parts
        if self._parts < 0:
            raise UnreadableBytesError("it has more parts than a value of its size may have")
        self._unchecked += parts
        if self._unchecked >= _CHECKED_EVERY:
            self._unchecked = 0
            if time.monotonic() > self._deadline:
                raise UnreadableBytesError(f"it takes more than {_MOST_SECONDS:g} s to read")

    def copy(self, octets: int) -> None:
        """Count bytes that are copied out of the value."""
        self._octets -= octets
        if self._octets < 0:
            raise UnreadableBytesError("it asks for more memory than a value of its size may")


def parse(pickled: bytes, is_known: Callable[[str], bool], changed: frozenset[str]) -> Any:
    """What a pickle describes. Calls of the names in `changed` may be given a state, or pairs."""
    try:
        return _Interpreter(is_known, changed).run(pickled)
    except UnreadableBytesError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        raise UnreadableBytesError(f"it is not a pickle: {short(error)}") from error


def short(text: object) -> str:
    """At most 200 printable characters."""
    return str(text)[:200].encode("ascii", "backslashreplace").decode().replace("\n", " ")


class _Interpreter:
    """Goes through the opcodes once; at the end of each it has a stack of what they describe."""

    def __init__(self, is_known: Callable[[str], bool], changed: frozenset[str]) -> None:
        self._is_known = is_known
        self._changed = changed
        self._stack: list[Any] = []
        self._outer: list[list[Any]] = []
        self._memo: dict[int, Any] = {}
        self._protocol = 0
        self._budget = ReadBudget()

    def run(  # noqa: C901, PLR0912, PLR0915 - a call for each opcode would cost most
        self, pickled: bytes
    ) -> Any:
        """The one value of the pickle. The first branches are most of a description of torch."""
        at, stack, memo, source = 0, self._stack, self._memo, io.BytesIO(pickled)
        while True:
            self._budget.spend(_CHECKED_EVERY)
            for _ in range(_CHECKED_EVERY):
                code = pickled[at]  # IndexError: it is cut short
                at += 1
                if code == _MEMOIZE:
                    memo[len(memo)] = stack[-1]
                elif code == _BINGET:
                    stack.append(memo[pickled[at]])
                    at += 1
                elif code == _LONG_BINGET:
                    stack.append(memo[int.from_bytes(pickled[at : at + 4], "little")])
                    at += 4
                elif code == _BININT1:
                    stack.append(pickled[at])
                    at += 1
                elif code in _CALLS:
                    args, called = stack.pop(), stack[-1]
                    if type(called) is not Name or type(args) is not tuple:
                        raise UnreadableBytesError("it calls what has no name")
                    stack[-1] = DescribedCall(called.text, args)
                elif code == _EMPTY_TUPLE:
                    stack.append(())
                elif code == _MARK:
                    self._outer.append(stack)
                    stack = self._stack = []
                elif code == _BUILD:
                    self._change(stack.pop(), stack[-1])
                elif code == _TUPLE1:
                    stack[-1] = (stack[-1],)
                elif code == _TUPLE2:
                    second = stack.pop()
                    stack[-1] = (stack[-1], second)
                elif code == _SETITEMS:
                    items, stack = stack, self._outer.pop()
                    self._stack = stack
                    self._put(stack[-1], items)
                elif code == _EMPTY_DICT:
                    stack.append(Pairs([]))
                elif code == _SHORT_BINUNICODE:
                    begin = at + 1
                    at = begin + pickled[at]
                    stack.append(str(pickled[begin:at], "utf-8", "surrogatepass"))
                elif code == _STOP:
                    return stack.pop()
                else:
                    step, read = _BY_CODE[code]
                    if read is None:
                        step(self, None)
                    else:
                        source.seek(at)
                        step(self, read(source))
                        at = source.tell()
                    stack = self._stack

    def recall(self, at: int) -> None:
        self._stack.append(self._memo[at])

    def remember(self, at: int) -> None:
        self._memo[at] = self._stack[-1]

    def begin(self, protocol: int) -> None:
        """Note the protocol: until 2, names are those of Python 2."""
        self._protocol = protocol

    def push_int(self, number: int) -> None:
        if number.bit_length() > _MOST_INT_BITS:
            raise UnreadableBytesError(f"it has a number of {number.bit_length()} bits")
        self._stack.append(number)

    def marked(self) -> list[Any]:
        """What is above the last mark."""
        above, self._stack = self._stack, self._outer.pop()
        return above

    def push_name(self, text: str) -> None:
        """Push a name: module and name, with a space between."""
        module, _, name = text.partition(" ")
        if self._protocol < 3:
            module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
            module = _compat_pickle.IMPORT_MAPPING.get(module, module)
        full = f"{module}.{name}"
        if not self._is_known(full):
            raise UnreadableBytesError(f"it is, or has in it, {short(full)}")
        self._stack.append(Name(full))

    def push_stacked_name(self, _: object) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if type(name) is not str or type(module) is not str:
            raise UnreadableBytesError("it has a name that is not a text")
        self.push_name(f"{module} {name}")

    def refer(self, _: object) -> None:
        reference = self._stack.pop()
        if type(reference) is not tuple:
            raise UnreadableBytesError("it refers to something outside of itself")
        self._stack.append(DescribedCall(STORED, reference))

    def _change(self, state: object, target: object) -> None:
        if (
            type(target) is not DescribedCall
            or target.name not in self._changed
            or target.state is not None
        ):
            raise UnreadableBytesError("it sets attributes of something that has none")
        target.state = state

    def put(self, items: list[Any]) -> None:
        self._put(self._stack[-1], items)

    def _put(self, target: object, items: list[Any]) -> None:
        if type(target) is Pairs:
            target.pairs.extend(items)
        elif type(target) is not DescribedCall or target.name not in self._changed:
            raise UnreadableBytesError("it puts keys into something that has none")
        elif type(target.pairs) is list:
            target.pairs.extend(items)
        else:
            target.pairs = items

    def append(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise UnreadableBytesError("it appends to something that is not a list")
        self._stack[-1].extend(items)

    def add(self, items: list[Any]) -> None:
        target = self._stack[-1]
        is_set = type(target) is DescribedCall and target.name == "builtins.set"
        if not is_set or type(target.args) is not tuple or [*map(type, target.args)] != [list]:
            raise UnreadableBytesError("it adds to something that is not a set")
        target.args[0].extend(items)

    def pop(self, _: object) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self.marked()

    @property
    def top(self) -> Any:
        return self._stack[-1]

    def push(self, value: object) -> None:
        self._stack.append(value)

    def take(self, count: int) -> list[Any]:
        """The last values of the stack, taken off."""
        taken = self._stack[-count:]
        if len(taken) < count:
            raise UnreadableBytesError("it takes more from its stack than there is")
        del self._stack[-count:]
        return taken


Step = Callable[[_Interpreter, Any], None]
_PUSHED = (
    "BININT BININT2 BINFLOAT FLOAT BINUNICODE SHORT_BINUNICODE UNICODE BINUNICODE8 "
    "BINBYTES SHORT_BINBYTES BINBYTES8 BYTEARRAY8 STRING BINSTRING SHORT_BINSTRING"
)
_STEPS: dict[str, Step] = {
    # `run` has branches for the other opcodes of data.
    **dict.fromkeys(_PUSHED.split(), _Interpreter.push),
    **dict.fromkeys(("BINGET", "LONG_BINGET", "GET"), _Interpreter.recall),
    **dict.fromkeys(("BINPUT", "LONG_BINPUT", "PUT"), _Interpreter.remember),
    "PROTO": _Interpreter.begin,
    "FRAME": lambda _, __: None,
    "INT": _Interpreter.push_int,
    "LONG": _Interpreter.push_int,
    "LONG1": _Interpreter.push_int,
    "LONG4": _Interpreter.push_int,
    "NONE": lambda self, _: self.push(None),
    "NEWTRUE": lambda self, _: self.push(True),  # noqa: FBT003 - a value
    "NEWFALSE": lambda self, _: self.push(False),  # noqa: FBT003 - a value
    "POP": _Interpreter.pop,
    "POP_MARK": lambda self, _: self.marked().clear(),
    "DUP": lambda self, _: self.push(self.top),
    "TUPLE": lambda self, _: self.push(tuple(self.marked())),
    "TUPLE3": lambda self, _: self.push(tuple(self.take(3))),
    "EMPTY_LIST": lambda self, _: self.push([]),
    "LIST": lambda self, _: self.push(self.marked()),
    "APPEND": lambda self, _: self.append(self.take(1)),
    "APPENDS": lambda self, _: self.append(self.marked()),
    "DICT": lambda self, _: self.push(Pairs(self.marked())),
    "SETITEM": lambda self, _: self.put(self.take(2)),
    "EMPTY_SET": lambda self, _: self.push(DescribedCall("builtins.set", ([],))),
    "ADDITEMS": lambda self, _: self.add(self.marked()),
    "FROZENSET": lambda self, _: self.push(DescribedCall("builtins.frozenset", (self.marked(),))),
    "GLOBAL": _Interpreter.push_name,
    "STACK_GLOBAL": _Interpreter.push_stacked_name,
    "BINPERSID": _Interpreter.refer,
}


def _refused(name: str) -> Step:
    def refuse(_: _Interpreter, __: object) -> None:
        raise UnreadableBytesError(f"it has the opcode {name}, which no data needs")

    return refuse


_BY_CODE: list[tuple[Step, Callable[[io.BytesIO], Any] | None]] = [
    (_refused(str(code)), None) for code in range(256)
]
for _code in pickletools.opcodes:
    _read: Any = _code.arg and _code.arg.reader
    _BY_CODE[ord(_code.code)] = _STEPS.get(_code.name, _refused(_code.name)), _read
_CODES = {_code.name: ord(_code.code) for _code in pickletools.opcodes}
_MEMOIZE, _STOP = _CODES["MEMOIZE"], _CODES["STOP"]
_BINGET, _LONG_BINGET = _CODES["BINGET"], _CODES["LONG_BINGET"]
_SHORT_BINUNICODE, _BININT1 = _CODES["SHORT_BINUNICODE"], _CODES["BININT1"]
_EMPTY_TUPLE, _EMPTY_DICT = _CODES["EMPTY_TUPLE"], _CODES["EMPTY_DICT"]
_MARK, _TUPLE1, _TUPLE2 = _CODES["MARK"], _CODES["TUPLE1"], _CODES["TUPLE2"]
_BUILD, _SETITEMS = _CODES["BUILD"], _CODES["SETITEMS"]
_CALLS = frozenset({_CODES["REDUCE"], _CODES["NEWOBJ"]})


class TreeBuilder:
    """Builds the tree that a pickle describes; `make` makes the calls."""

    def __init__(
        self, make: Callable[[DescribedCall, "TreeBuilder"], Any], budget: ReadBudget
    ) -> None:
        self._make = make
        self.budget = budget
        self._depth = 0

    def build(self, node: object, *, is_argument: bool = False) -> Any:
        """A part of it. A name is not a value, but may be an argument."""
        self.budget.spend(1)
        if type(node) is Name and is_argument:
            return node
        return node if type(node) in _SCALARS else self._nested(node)

    def _nested(self, node: object) -> Any:
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise UnreadableBytesError(f"its parts are nested more than {MOST_DEPTH} deep")
        try:
            made = self._made(node)
        except UnreadableBytesError:
            raise
        except Exception as error:
            name = node.name if isinstance(node, DescribedCall) else "a part of it"
            raise UnreadableBytesError(f"{short(name)} cannot be made: {short(error)}") from error
        self._depth -= 1
        return made

    def mapping(self, pairs: Sequence[object], into: dict[Any, Any]) -> dict[Any, Any]:
        """Put keys and values into a dictionary."""
        built = iter(self.each(pairs))
        for key in built:
            into[key] = next(built)
        return into

    def each(self, nodes: Sequence[object]) -> list[Any]:
        """The parts of a sequence."""
        self.budget.spend(len(nodes))
        return [node if type(node) in _SCALARS else self._nested(node) for node in nodes]

    def _made(self, node: object) -> Any:
        kind = type(node)
        if kind is DescribedCall:
            return self._make(node, self)  # type: ignore[arg-type]
        if kind is tuple:
            return tuple(self.each(node)) if node else ()  # type: ignore[arg-type]
        if kind is list:
            return self.each(node)  # type: ignore[arg-type]
        if isinstance(node, Pairs):
            return self.mapping(node.pairs, {})
        if isinstance(node, Name):
            return self._make(DescribedCall(NAMED, (node.text,)), self)
        if isinstance(node, bytearray):
            self.budget.copy(len(node))
            return bytearray(node)
        raise UnreadableBytesError(f"it has a part of type {kind.__name__}")
