"""Which old jobs stay, and how large the next page of a removal is; pure."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass

_SMALLEST, _LARGEST = 100, 2000
_TOO_LONG_S, _SHORT_S = 0.03, 0.01
_REST_AT_LEAST_S = 0.01


def reason_to_keep(
    labels: Mapping[str, str],
    *,
    wanted: Collection[str],
    is_corrected: bool,
    pinned_steps: Collection[int],
) -> str:
    """Why an old job stays; empty for one that goes. `wanted` has labels as `name=value`."""
    kept_by = [f"{name}={value}" for name, value in labels.items() if f"{name}={value}" in wanted]
    if kept_by:
        return f"it has the label {kept_by[0]}"
    if pinned_steps:
        return f"its checkpoint of step {max(pinned_steps)} is pinned"
    if is_corrected:
        return "a person has named the cause of one of its incidents"
    return ""


@dataclass(slots=True)
class PagePace:
    """Pages that hold the writer's lock for some ten milliseconds, and as much time for others."""

    rows: int = 200

    def rest_s(self, took_s: float) -> float:
        """How long others go first; the next page has another size if this one was too slow."""
        if took_s > _TOO_LONG_S:
            self.rows = max(_SMALLEST, self.rows // 2)
        elif took_s < _SHORT_S:
            self.rows = min(_LARGEST, self.rows * 2)
        return max(_REST_AT_LEAST_S, took_s)
