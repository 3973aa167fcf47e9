"""Which collectives are synchronous for a rank: it goes on only after the last one has entered."""

from dataclasses import dataclass, field

import numpy as np

from everstep_services.straggler.domain.arrays import means_by
from everstep_services.straggler.domain.live.arrivals import Matched
from everstep_services.straggler.domain.operations import Array

_SLOPE = 0.5
_KEPT = 0.8
"""What earlier windows count, each over the one after it."""
_MOST_ROWS = 512
_MOST_PAIRS = 4096
_BITS = 20
_MASK = (1 << _BITS) - 1


@dataclass(slots=True)
class Waits:
    """What has been learned of pairs of successive operations, over the windows of a round."""

    sums: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Of each kind of pair: the sum of squares of the time to the last entry, and that of its
    products with the time to the rank's next entry, both without their means by rank."""

    def learn(self, matched: Matched, phase: Array) -> Array:
        """Take in a window. Returns for each entry whether the rank waits in it for the last."""
        pair = _pairs(matched, phase)
        rows = matched.row
        every = max(1, (int(rows.max()) + 1) // _MOST_ROWS)
        some = np.flatnonzero(matched.leads & (rows % every == 0))
        kinds, index = np.unique(pair[some], return_inverse=True)
        to_last, to_next = _relative(matched)
        to_last, to_next = to_last[some], to_next[some]
        squares, products = _sums(rows[some], index, to_last, to_next, len(kinds))
        for number, kind in enumerate(kinds):
            square, product = self.sums.pop(int(kind), (0.0, 0.0))
            self.sums[int(kind)] = (
                square * _KEPT + float(squares[number]), product * _KEPT + float(products[number]),
            )  # fmt: skip
        for old in list(self.sums)[:-_MOST_PAIRS]:
            del self.sums[old]
        return self.in_entries(matched, phase)

    def in_entries(self, matched: Matched, phase: Array) -> Array:
        """For each entry whether the rank waits in it for the last, by what was learned."""
        pair = _pairs(matched, phase)
        kinds = np.sort(np.fromiter(self.sums, dtype=np.int64, count=len(self.sums)))
        if not len(kinds):
            return matched.leads
        waits = np.array([self._is_synchronous(int(kind)) for kind in kinds])
        place = np.minimum(np.searchsorted(kinds, pair), len(kinds) - 1)
        seen = kinds[place] == pair
        synchronous: Array = (waits[place] | ~seen | matched.is_transfer) & matched.leads
        return synchronous

    def _is_synchronous(self, kind: int) -> bool:
        square, product = self.sums[kind]
        return product > _SLOPE * square or square <= 0


def _relative(matched: Matched) -> tuple[Array, Array]:
    """The times to the last entry and to the rank's next one.

    When a collective ends on devices nobody knows: there only what ranks differ by is known.
    """
    to_last, to_next = matched.last_s - matched.at_s, matched.to_next_s
    if not matched.is_timed:
        return to_last, to_next
    cells = int(matched.cell.max()) + 1

    def apart(times: Array) -> Array:
        usual = means_by(matched.cell, times, cells)[matched.cell]
        return np.where(matched.is_transfer, times, times - usual)

    return apart(to_last), apart(to_next)


def _pairs(matched: Matched, phase: Array) -> Array:
    """A number for each entry, equal for the same operation before the same operation."""
    following = np.r_[matched.op[1:], 0].astype(np.int64) & _MASK
    own = (matched.op.astype(np.int64) & _MASK) << 2 * _BITS
    pairs: Array = own | following << _BITS | phase & _MASK
    return pairs


def _sums(
    row: Array, index: Array, to_last: Array, to_next: Array, kinds: int
) -> tuple[Array, Array]:
    cell = np.unique(row, return_inverse=True)[1] * kinds + index
    count = np.maximum(np.bincount(cell), 1)
    last = to_last - (np.bincount(cell, weights=to_last) / count)[cell]
    following = to_next - (np.bincount(cell, weights=to_next) / count)[cell]
    squares: Array = np.bincount(index, weights=last * last, minlength=kinds)
    products: Array = np.bincount(index, weights=last * following, minlength=kinds)
    return squares, products
