"""Many ranks in few words."""

from collections.abc import Iterable


def ranges(ranks: Iterable[int]) -> str:
    """`0-3,7`; long lists are cut, with their length."""
    parts: list[list[int]] = []
    count = 0
    for rank in sorted(set(ranks)):
        count += 1
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    text = ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts[:12])
    return text if len(parts) <= 12 else f"{text},… ({count} ranks)"


def named(ranks: Iterable[int]) -> str:
    """`rank 3` or `ranks 0-3,7`."""
    every = sorted(set(ranks))
    return f"rank {every[0]}" if len(every) == 1 else f"ranks {ranges(every)}"
