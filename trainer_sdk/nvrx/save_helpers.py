"""NVRx's helpers around saves: maps and comparisons of nested states, and timed blocks."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from time import monotonic
from typing import Any

import torch

from trainer_sdk.bootstrap.garbage_collection import collector_paused

fallback_logger = logging.getLogger("nvrx")
_ALWAYS = float("-inf")
_Path = tuple[Any, ...]
_names: list[str] = []
_loggers: list[logging.Logger] = []


@contextmanager
def logger_stack(
    name: str | None = None, current_logger: logging.Logger | None = None
) -> Iterator[tuple[str, logging.Logger]]:
    """Add a name and a logger for the calls inside; gives all names so far, and the logger."""
    names, loggers = len(_names), len(_loggers)
    if name:
        _names.append(name)
    if current_logger:
        _loggers.append(current_logger)
    try:
        yield ".".join(_names), _loggers[-1] if _loggers else fallback_logger
    finally:
        del _names[names:]
        del _loggers[loggers:]


@contextmanager
def debug_time(
    name: str,
    logger: logging.Logger | None = None,
    threshold: float = _ALWAYS,
    level: int | None = None,
) -> Iterator[None]:
    """Log how long a block takes, if it takes at least `threshold` seconds."""
    with logger_stack(name, logger) as (names, last):
        began = monotonic()
        try:
            yield
        finally:
            took_s = monotonic() - began
            usual = logging.DEBUG if threshold == _ALWAYS else logging.WARNING
            if took_s >= threshold:
                last.log(usual if level is None else level, "%s took %.4fs", names, took_s)


def debug_msg(msg: str) -> None:
    """Log a line, with the names of the blocks around it."""
    with logger_stack() as (names, last):
        last.debug("%s %s", names, msg)


def preload_tensors(state_dict: Any, non_blocking: bool = True) -> Any:
    """The state with copies of its tensors on the CPU, which training does not change."""
    return dict_list_map_outplace(
        lambda value: (
            value.detach().to("cpu", non_blocking=non_blocking, copy=True)
            if isinstance(value, torch.Tensor)
            else value
        ),
        state_dict,
    )


def wrap_for_async(fn: Callable[..., Any]) -> Callable[..., None]:
    """The function, with the garbage collector off while it runs."""
    return collector_paused()(fn)


def dict_list_map_outplace(f: Callable[[Any], Any], x: Any) -> Any:
    """A copy of nested dicts and lists, with `f` applied to each value."""
    if isinstance(x, dict):
        return {key: dict_list_map_outplace(f, value) for key, value in x.items()}
    if isinstance(x, list):
        return [dict_list_map_outplace(f, value) for value in x]
    return f(x)


def diff(
    x1: Any, x2: Any, prefix: _Path = ()
) -> tuple[list[Any], list[Any], list[tuple[_Path, type, type]]]:
    """What only the first has, what only the second has, and where both differ."""
    if isinstance(x1, Mapping) and isinstance(x2, Mapping):
        left = [(*prefix, key) for key in x1 if key not in x2]
        right = [(*prefix, key) for key in x2 if key not in x1]
        return _diff_of({key: (x1[key], x2[key]) for key in x1 if key in x2}, prefix, left, right)
    if isinstance(x1, list | tuple) and isinstance(x2, list | tuple):
        shared = min(len(x1), len(x2))
        left = [*range(shared, len(x1))]
        right = [*range(shared, len(x2))]
        return _diff_of(dict(enumerate(zip(x1, x2, strict=False))), prefix, left, right)
    if hasattr(x1, "replica_id") and hasattr(x2, "replica_id"):  # a shard of Megatron-Core
        return diff(x1.data, x2.data, (*prefix, type(x1)))
    return [], [], [] if _is_equal(x1, x2) else [(prefix, type(x1), type(x2))]


def _diff_of(
    pairs: Mapping[Any, tuple[Any, Any]], prefix: _Path, left: list[Any], right: list[Any]
) -> tuple[list[Any], list[Any], list[tuple[_Path, type, type]]]:
    unequal: list[tuple[_Path, type, type]] = []
    for key, (first, second) in pairs.items():
        only_left, only_right, differ = diff(first, second, (*prefix, key))
        left += only_left
        right += only_right
        unequal += differ
    return left, right, unequal


def _is_equal(first: Any, second: Any) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return first.shape == second.shape and torch.equal(first.cpu(), second.cpu())
    try:
        return bool(first == second)
    except (RuntimeError, ValueError):  # arrays: compare each element
        try:
            return bool((first == second).all())
        except Exception:  # noqa: BLE001 - values of unknown types
            return False
