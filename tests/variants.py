"""What is tried besides: parameters that `make test` leaves to `make test-all`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def variant(*values: Any, id: str | None = None) -> Any:
    """A parameter set that only `make test-all` tries: another of a kind that is tried anyway."""
    return pytest.param(*values, id=id, marks=pytest.mark.variant)


def first_of(tried: Collection[str], all_: Iterable[str]) -> list[Any]:
    """All of them, in this order; those that are not among the first are variants."""
    return [one if one in tried else variant(one) for one in all_]
