"""Sketches of given durations, as the agent's timings make them one duration at a time."""

import math
from collections import Counter
from collections.abc import Iterable

from everstep.messages.beats.sketch import Sketch, bucket_of


def sketch_of(durations_s: Iterable[float]) -> Sketch:
    """The sketch of some durations. Negative ones, from a clock that jumped, count as zero."""
    kept = [max(0.0, duration_s) for duration_s in durations_s]
    if not kept:
        return Sketch()
    buckets = Counter(bucket_of(duration_s) for duration_s in kept)
    return Sketch(
        count=len(kept),
        sum_s=math.fsum(kept),
        min_s=min(kept),
        max_s=max(kept),
        buckets=tuple(sorted(buckets.items())),
    )
