"""The metrics that a training reports on its page, such as its loss."""

from _thread import RLock
from struct import pack, unpack
from time import monotonic_ns

from trainer_sdk import layout
from trainer_sdk.section_table import SectionTable, write_text

_NAME_WORDS = layout.VALUE_NAME_BYTES // 8


class ReportedMetrics:
    """The latest value of each metric, by name."""

    def __init__(self, words: "memoryview[int]", table: SectionTable) -> None:
        self._words = words
        self._table = table
        self._numbers: dict[str, int] = {}
        self._lock = RLock()

    def show(self, name: str, value: float) -> None:
        """Write the latest value of a metric."""
        bits = self._bits(str(name), value)
        if bits is None:
            return
        at = self._place(str(name))
        if at is not None:
            now = monotonic_ns()
            self._words[at + _NAME_WORDS] = bits
            self._words[at + _NAME_WORDS + 1] = now

    def detach(self, words: "memoryview[int]") -> None:
        """Write to other memory from now on."""
        self._words = words
        self._lock = RLock()

    def _bits(self, name: str, value: float) -> int | None:
        if getattr(value, "is_cuda", False):
            self._table.misused(f"{name!r} is on a GPU, and reading it would wait: report a number")
            return None
        try:
            (bits,) = unpack("q", pack("d", value))
        except Exception:  # noqa: BLE001 - tensors and others raise errors of their own
            self._table.misused(f"{name!r} must be a number, and is {type(value)}")
            return None
        return int(bits)

    def _place(self, name: str) -> int | None:
        number = self._numbers.get(name)
        if number is None:
            with self._lock:
                number = self._numbers.get(name)
                if number is None:
                    number = len(self._numbers)
                    if number >= layout.VALUES_MOST:
                        self._table.misused(
                            f"{name!r} is not shown: a page has {layout.VALUES_MOST} values at most"
                        )
                        return None
                    at = layout.VALUES_AT + number * layout.VALUE_WORDS
                    write_text(self._words, at, name, layout.VALUE_NAME_BYTES)
                    self._words[layout.VALUES] = number + 1
                    self._numbers[name] = number
        return layout.VALUES_AT + number * layout.VALUE_WORDS
