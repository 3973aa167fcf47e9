"""Scalars that several ranks have: step counts of optimizers, and other numbers and texts.

One rank writes each of them, and a restore gives it to all, so they should be the same on all.
"""

import msgspec
import torch

from everstep.hashing import hash_of
from trainer_sdk.checkpoint.flat_state import FlatState, found_at
from trainer_sdk.checkpoint.rank_group import RankGroup
from trainer_sdk.checkpoint.save.plan import Plan

_DIGITS = 15
_ABSENT = -(16**_DIGITS)
_NAMED = 3


class SharedScalars:
    """Compares the scalars of all ranks at each save; each difference is reported once."""

    def __init__(self, group: RankGroup) -> None:
        self._group = group
        self._reported: set[str] = set()

    def bounds(self, plan: Plan | None, flat: FlatState | None) -> list[int]:
        """Numbers whose highest values over all ranks show whether they agree."""
        if plan is None:
            return []
        bounds: list[int] = []
        for numbers in plan.shared:
            if flat is None or not numbers:
                bounds += [_ABSENT, _ABSENT]
                continue
            shown = list(self._shown(plan, flat, numbers).items())
            digest = int(hash_of(msgspec.json.encode(shown))[:_DIGITS], 16)
            bounds += [digest, -digest]
        return bounds

    def difference(self, plan: Plan, flat: FlatState, highest: list[int]) -> str:
        """The scalars that differ, as rank 0 reports them. All ranks call this together."""
        pairs = zip(highest[::2], highest[1::2], strict=True)
        groups = [number for number, (most, least) in enumerate(pairs) if most != -least]
        if not groups:
            return ""
        numbers = tuple(number for group in groups for number in plan.shared[group])
        told = self._group.gather(self._shown(plan, flat, numbers), dict[str, str])
        seen: dict[str, dict[str, int]] = {}
        for rank, shown in enumerate(told):
            for key, value in shown.items():
                seen.setdefault(key, {}).setdefault(value, rank)
        differing = {key: values for key, values in seen.items() if len(values) > 1}
        self._reported |= differing.keys()
        return "; ".join(
            f"{key} is {' and '.join(f'{value} on rank {rank}' for value, rank in values.items())}"
            for key, values in list(differing.items())[:_NAMED]
        ) + (f"; and {len(differing) - _NAMED} more" if len(differing) > _NAMED else "")

    def _shown(self, plan: Plan, flat: FlatState, numbers: tuple[int, ...]) -> dict[str, str]:
        shown = {}
        for number in numbers:
            value, key = found_at(flat, plan.local.indices[number]), plan.local.pieces[number].key
            if isinstance(value, torch.Tensor):
                value = value.item() if value.is_cpu else None  # a GPU would have to be waited for
            if type(value) in (int, float, bool, str) and key not in self._reported:
                shown[key] = repr(value)
        return shown
