"""Checks of the arguments that scripts give to public methods; errors name value and remedy."""

import math
import operator
import re
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, TypeVar

Made = TypeVar("Made")
_MOST = (1 << 63) - 1
_LONGEST = 60
_JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,127}")
_LONGEST_OCCASION = 64


def whole(name: str, value: object, least: int = 0, most: int = _MOST) -> int:
    """A whole number as an `int`, also if numpy or torch has it; never a truth value."""
    number = None
    try:
        if not _is_truth(value):
            number = operator.index(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        number = None
    if number is None:
        raise TypeError(f"{name} must be a whole number, and is {shown(value)}: give int(…) of it")
    if not least <= number <= most:
        bounds = f"at least {least}" if most == _MOST else f"from {least} to {most}"
        raise ValueError(f"{name} must be {bounds}, and is {shown(value)}")
    return number


def seconds(name: str, value: object, *, may_be_zero: bool = True) -> float:
    """A time as a `float`: finite, and not negative."""
    number = math.nan
    if not _is_truth(value) and not isinstance(value, (str, bytes)):
        try:
            number = float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):
            number = math.nan
    if not 0 <= number < math.inf or (not may_be_zero and not number):
        least = "0 or more" if may_be_zero else "more than 0"
        raise ValueError(f"{name} must be a number of seconds, {least}, and is {shown(value)}")
    return number


def share(name: str, value: object) -> float:
    """A part of a whole, above 0 and up to 1."""
    number = value if isinstance(value, (int, float)) and not _is_truth(value) else math.nan
    if not 0 < number <= 1:
        raise ValueError(f"{name} must be above 0 and at most 1, as 0.01, and is {shown(value)}")
    return float(number)


def truth(name: str, value: object) -> bool:
    """True or False; a number or a text is not one of them."""
    if not isinstance(value, bool) and type(value).__name__ not in ("bool_", "bool"):
        raise TypeError(f"{name} must be True or False, and is {shown(value)}")
    return bool(value)


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """One of these texts."""
    if not isinstance(value, str) or value not in allowed:
        names = ", ".join(map(repr, allowed))
        raise ValueError(f"{name} must be one of {names}, and is {shown(value)}")


def instance(name: str, value: object, of: type[Made]) -> Made:
    """An object of this class, or one with its defaults for None."""
    if value is None:
        return of()
    if not isinstance(value, of):
        raise TypeError(f"{name} must be {of.__name__}(…), and is {shown(value)}")
    return value


def occasion(value: object) -> None:
    """Check the occasion of a save: a few words for the record."""
    if not isinstance(value, str) or not value.isprintable() or len(value) > _LONGEST_OCCASION:
        raise ValueError(
            f"occasion must be a text of at most {_LONGEST_OCCASION} characters, as 'requested', "
            f"and is {shown(value)}"
        )


def functions(name: str, value: object) -> tuple[Callable[[], None], ...]:
    """Functions without arguments."""
    if callable(value) or isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a tuple of functions, as (done,), and is {shown(value)}")
    calls = tuple(value)
    for call in calls:
        if not callable(call):
            raise TypeError(f"{name} must be a tuple of functions, and has {shown(call)} in it")
    return calls


def objects(name: str, value: object, method: str) -> tuple[Any, ...]:
    """Objects that have this method, in any collection of them."""
    if hasattr(value, method) or isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{name} must be a tuple, as (one,), and is {shown(value)}")
    items = tuple(value)
    for item in items:
        if not callable(getattr(item, method, None)):
            raise TypeError(f"{name} has {shown(item)} in it, which has no {method}")
    return items


def state(value: object, *, is_filled: bool = False) -> None:
    """A dict of named parts; one that a restore fills can be written to."""
    wanted = MutableMapping if is_filled else Mapping
    if not isinstance(value, wanted):
        raise TypeError(
            'state must be a dict of named parts, as {"model": model, "optimizer": optimizer}, '
            f"and is {shown(value)}"
        )


def path(name: str, value: object) -> str:
    """A path or URL as text."""
    as_path = getattr(type(value), "__fspath__", None)
    text = value if as_path is None else as_path(value)
    if not isinstance(text, str) or "\0" in text:
        raise TypeError(f"{name} must be a path or a URL as text, and is {shown(value)}")
    return text


def job(value: object) -> str:
    """The name of a job, which is a part of paths; empty for none."""
    if not isinstance(value, str):
        raise TypeError(f"job must be a text, and is {shown(value)}")
    if value and not _JOB.fullmatch(value):
        raise ValueError(
            f"{shown(value)} cannot name a job: use 1 to 128 letters, digits, '_' and '-', the "
            "first a letter or digit"
        )
    return value


def wait(blocking: object, within_s: object) -> tuple[bool, float | None]:
    """Whether to wait, and for how long; None for no limit."""
    limit_s = None if within_s is None else seconds("within_s", within_s)
    return truth("blocking", blocking), limit_s


def shown(value: object) -> str:
    """A value in a few characters, with its type."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a class of the user's may raise anything here
        text = "a value"
    text = " ".join(text.split())
    text = text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
    return f"{text} ({type(value).__name__})"


def _is_truth(value: object) -> bool:
    """Whether it is a truth value, also one of numpy's or torch's."""
    dtype = str(getattr(value, "dtype", ""))
    return isinstance(value, bool) or dtype in ("bool", "torch.bool")
