"""What came of each run: a line of JSON, and the table of them all."""

from collections.abc import Iterable, Sequence
from math import sqrt
from pathlib import Path
from statistics import median

import msgspec

TARGET = 0.95
WITHIN_WINDOWS = 3
_Z = 1.959964
"""Of 95 %."""


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One rank was slowed, or one host."""

    kind: str
    ranks: int
    seed: int
    number: int
    """Of the runs of this kind with this seed, from 0."""
    slowed: tuple[int, ...]
    """The rank, or those of the host."""
    found: tuple[int, ...] = ()
    """Which were named until it was cleared, in that order."""
    cause: str = ""
    """Of the first that was named."""
    expected_cause: str = ""
    """Empty where none is asked for."""
    reason: str = ""
    windows: int | None = None
    """How many whole windows it was slow, the one that named it the last."""
    window_steps: int = 0
    window_s: float = 0.0
    """How long a window lasted while all was well."""
    seconds: float = 0.0
    """From the first slow step until it was named, as REST shows."""
    cleared_s: float | None = None
    """From when it was healed; None if it was not cleared in time."""
    load: float = 0.0

    @property
    def is_named(self) -> bool:
        """Nobody else was."""
        return bool(self.found) and set(self.found) <= set(self.slowed)

    @property
    def is_explained(self) -> bool:
        return self.is_named and self.cause == self.expected_cause

    @property
    def is_soon(self) -> bool:
        return self.is_named and self.windows is not None and self.windows <= WITHIN_WINDOWS

    @property
    def wrong(self) -> str:
        """What was not as it should be; empty if all was."""
        if not self.is_named:
            return f"slowed {_shown(self.slowed)}, found {_shown(self.found)}"
        if self.expected_cause and not self.is_explained:
            return f"cause {self.cause}: {self.reason}"
        if not self.is_soon:
            return f"after {self.windows} windows"
        return "" if self.cleared_s is not None else "not cleared"


def _shown(ranks: Sequence[int]) -> str:
    return "rank " + ", ".join(map(str, ranks)) if ranks else "nobody"


def read_results(paths: Iterable[Path]) -> list[Result]:
    """Those of all files; a run that is in several counts once."""
    found: dict[tuple[str, int, int, int], Result] = {}
    for path in paths:
        lines = path.read_bytes().splitlines() if path.exists() else []
        for number, line in enumerate(lines, 1):
            try:
                one = _DECODER.decode(line)
            except (msgspec.MsgspecError, ValueError) as error:
                raise SystemExit(f"{path}, line {number}: {error}: remove the line") from error
            found[(one.kind, one.ranks, one.seed, one.number)] = one
    return list(found.values())


def append_result(path: Path, one: Result) -> None:
    with path.open("ab") as file:
        file.write(msgspec.json.encode(one) + b"\n")


def wilson(good: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share."""
    if not count:
        return 0.0, 1.0
    share, z2 = good / count, _Z**2
    middle = (share + z2 / (2 * count)) / (1 + z2 / count)
    reach = _Z / (1 + z2 / count) * sqrt(share * (1 - share) / count + z2 / (4 * count**2))
    return max(0.0, middle - reach), min(1.0, middle + reach)


HEAD = (
    f"{'ranks':>5}  {'what is slow':15}{'n':>4}{'right rank':>17}{'right cause':>17}"
    f"{'within 3 windows':>18}{'windows':>9}{'s':>6}{'cleared':>9}{'window':>15}"
)


def table(results: Iterable[Result]) -> list[str]:
    """A row for each kind and number of ranks, the 95 % interval behind each share."""
    by_case: dict[tuple[int, str], list[Result]] = {}
    for one in results:
        by_case.setdefault((one.ranks, one.kind), []).append(one)
    return [HEAD, *(row(by_case[case]) for case in sorted(by_case))]


def row(runs: Sequence[Result]) -> str:
    first, count = runs[0], len(runs)
    windows = [one.windows for one in runs if one.is_named and one.windows is not None]
    seconds = [one.seconds for one in runs if one.is_named]
    cause = _share([one.is_explained for one in runs]) if first.expected_cause else "not asked"
    many = f"{median(windows):.0f} ({max(windows)})" if windows else "-"
    took = f"{median(seconds):.1f}" if seconds else "-"
    cleared = sum(one.cleared_s is not None for one in runs if one.found)
    window = f"{first.window_steps} steps {median(one.window_s for one in runs):.1f} s"
    return (
        f"{first.ranks:5}  {first.kind:15}{count:4}{_share([one.is_named for one in runs]):>17}"
        f"{cause:>17}{_share([one.is_soon for one in runs]):>18}{many:>9}{took:>6}"
        f"{cleared:4}/{sum(bool(one.found) for one in runs):<4}{window:>15}"
    )


def _share(good: Sequence[bool]) -> str:
    low, high = wilson(sum(good), len(good))
    return f"{sum(good) / len(good):.0%} ({low:.0%}-{high:.0%})"


def missed(results: Iterable[Result]) -> list[str]:
    """The kinds that are below the target, with what went wrong."""
    by_case: dict[tuple[int, str], list[Result]] = {}
    for one in results:
        by_case.setdefault((one.ranks, one.kind), []).append(one)
    said = []
    for (ranks, kind), runs in sorted(by_case.items()):
        enough = TARGET * len(runs)
        shares = {
            "right rank": sum(one.is_named for one in runs),
            "within three windows": sum(one.is_soon for one in runs),
        }
        if runs[0].expected_cause:
            shares["right cause"] = sum(one.is_explained for one in runs)
        if below := [name for name, good in shares.items() if good < enough]:
            wrong = [f"  run {one.number}: {one.wrong}" for one in runs if one.wrong]
            said += [f"below {TARGET:.0%}: {ranks} ranks, {kind}: {', '.join(below)}", *wrong]
    return said


_DECODER = msgspec.json.Decoder(Result)
