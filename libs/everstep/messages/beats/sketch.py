"""Durations in little space: a histogram that merges without loss and knows its error."""

import math
from collections import Counter

from everstep.messages.base import Int, Part

BUCKETS_PER_DOUBLING = 8
"""Each bucket is 2^(1/8), about 9 %, wider than the one before."""
SHORTEST_S = 1e-9
"""Anything shorter counts as this long."""


class Sketch(Part, frozen=True, kw_only=True):
    """A set of durations: their number, sum and extremes exactly, the rest by bucket.

    Bucket `i` holds the durations above 2^((i-1)/8) s and up to 2^(i/8) s: bucket 0 ends
    at one second, bucket -80 at 977 µs. A quantile read from it is off by 4.5 % at most.
    Buckets are fixed, so sketches of any rank, window and release can be merged.
    """

    count: Int = 0
    """How many durations."""
    sum_s: float = 0.0
    """Their sum."""
    min_s: float = 0.0
    """The shortest; 0 when there is none."""
    max_s: float = 0.0
    """The longest; 0 when there is none."""
    buckets: tuple[tuple[Int, Int], ...] = ()
    """`[i, how many]` for each bucket that is not empty, by `i`."""

    def merged(self, other: "Sketch") -> "Sketch":
        """Both sets together."""
        if not self.count or not other.count:
            return self if self.count else other
        buckets = Counter(dict(self.buckets))
        buckets.update(dict(other.buckets))
        return Sketch(
            count=self.count + other.count,
            sum_s=self.sum_s + other.sum_s,
            min_s=min(self.min_s, other.min_s),
            max_s=max(self.max_s, other.max_s),
            buckets=tuple(sorted(buckets.items())),
        )

    def quantile_s(self, share: float) -> float:
        """The duration that `share` (0 to 1) of all do not exceed; 0 when there is none."""
        wanted = max(1, math.ceil(share * self.count))
        for index, count in self.buckets:
            wanted -= count
            if wanted <= 0:
                middle_s = 2 ** ((index - 0.5) / BUCKETS_PER_DOUBLING)
                return min(max(middle_s, self.min_s), self.max_s)
        return self.max_s


def bucket_of(duration_s: float) -> int:
    """The bucket that a duration belongs to."""
    return math.ceil(math.log2(max(duration_s, SHORTEST_S)) * BUCKETS_PER_DOUBLING)
