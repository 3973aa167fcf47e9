"""The verdict of each run of the corpus, and the tables of them all."""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median

import msgspec

_BINS = (0.5, 0.7, 0.9, 1.01)


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """One run of one fault, its label, and the verdict."""

    fault: str
    variant: int
    seed: int
    causes: tuple[str, ...]
    """Those that are right, that of the label first; none where only ranks are labelled."""
    culprits: tuple[int, ...]
    world: int
    said: str = ""
    """The cause of the verdict; empty where there was none."""
    kind: str = ""
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()
    confidence: float = 0.0
    is_inconclusive: bool = False
    reason: str = ""
    first_s: float | None = None
    """From the finding to the first verdict."""
    seconds: float = 0.0

    @property
    def label(self) -> str:
        return self.causes[0] if self.causes else "any"

    @property
    def is_silent(self) -> bool:
        """Nobody was accused of anything."""
        return self.is_inconclusive or not self.said

    @property
    def is_right(self) -> bool:
        """An honest "unknown" is right where nothing tells the cause."""
        return not self.causes or (self.said or "unknown") in self.causes

    @property
    def names_rank(self) -> bool:
        """Exactly the culprits; where all are, nobody in particular is right, too."""
        if len(self.culprits) == self.world and not self.ranks:
            return True
        return set(self.ranks) == set(self.culprits)

    @property
    def line(self) -> str:
        """For somebody who watches."""
        is_good = self.is_right and (self.is_silent or self.names_rank) and not self.nodes
        mark = "ok  " if is_good else "    " if self.is_silent else "BAD "
        said = "inconclusive" if self.is_inconclusive else self.said or "no verdict"
        name = f"{self.fault}-{self.variant}"
        return (
            f"{mark}{name:22}{self.label:15}{said:15}{self.confidence:5.2f}  "
            f"{list(self.ranks)} of {list(self.culprits)}  {self.reason[:90]}"
        )


def read_scores(file: Path) -> list[Score]:
    """What a file holds."""
    if not file.exists():
        return []
    return [msgspec.json.decode(line, type=Score) for line in file.read_bytes().splitlines()]


def append_score(file: Path, one: Score) -> None:
    """Add one to a file."""
    with file.open("ab") as out:
        out.write(msgspec.json.encode(one) + b"\n")


def tables(scores: Sequence[Score]) -> Iterator[str]:
    """The classes of faults, the confusion of causes, and how sure it may be."""
    yield from _by_fault(scores)
    yield ""
    yield from _confusion(scores)
    yield ""
    yield from _calibration(scores)
    yield ""
    yield from _summary(scores)


def _by_fault(scores: Sequence[Score]) -> Iterator[str]:
    yield f"{'':20}{'n':>4}{'cause':>8}{'ranks':>8}{'silent':>8}{'wrong':>8}"
    for name in dict.fromkeys(one.fault for one in scores):
        of = [one for one in scores if one.fault == name]
        wrong = [one for one in of if not one.is_silent and not one.is_right]
        cells = (
            _share(sum(one.is_right for one in of), len(of)),
            _share(sum(one.names_rank for one in of), len(of)),
            _share(sum(one.is_silent for one in of), len(of)),
            _share(len(wrong), len(of)),
        )
        yield f"{name:20}{len(of):4}" + "".join(f"{cell:>8}" for cell in cells)


def _confusion(scores: Sequence[Score]) -> Iterator[str]:
    said = sorted({_column(one) for one in scores})
    counts = Counter((one.label, _column(one)) for one in scores)
    yield f"{'label, and verdict':25}" + "".join(f"{name[:13]:>14}" for name in said)
    for label in sorted({one.label for one in scores}):
        yield f"{label:25}" + "".join(f"{counts[label, name] or '.':>14}" for name in said)
    yield f"{'cause':25}{'precision':>14}{'recall':>14}"
    for cause in sorted({one.label for one in scores} - {"unknown", "any"}):
        named = [one for one in scores if _column(one) == cause]
        meant = [one for one in scores if one.label == cause]
        right = [one for one in named if one.is_right]
        hit = [one for one in meant if one.is_right and not one.is_silent]
        precision, recall = _share(len(right), len(named)), _share(len(hit), len(meant))
        yield f"{cause:25}{precision:>14}{recall:>14}"


def _calibration(scores: Sequence[Score]) -> Iterator[str]:
    yield f"{'confidence':20}{'n':>4}{'right':>8}"
    low = 0.0
    for high in _BINS:
        of = [one for one in scores if not one.is_silent and low <= one.confidence < high]
        if of:
            right = _share(sum(one.is_right for one in of), len(of))
            yield f"{f'{low:.1f} to {min(high, 1.0):.1f}':20}{len(of):4}{right:>8}"
        low = high


def _summary(scores: Sequence[Score]) -> Iterator[str]:
    spoken = [one for one in scores if not one.is_silent]
    silent = len(scores) - len(spoken)
    right = _share(sum(one.is_right for one in spoken), len(spoken))
    ranks = _share(sum(one.names_rank for one in spoken), len(spoken))
    yield f"{len(scores)} runs; silent in {silent} ({_share(silent, len(scores))})"
    yield f"where it spoke: cause right {right}, ranks right {ranks}"
    yield f"healthy nodes accused: {sum(bool(one.nodes) for one in scores)}"
    times = sorted(one.first_s for one in scores if one.first_s is not None)
    if times:
        middle, most = median(times), times[-1]
        yield f"from the finding to the first verdict: median {middle:.1f} s, most {most:.1f} s"


def _column(one: Score) -> str:
    return "silent" if one.is_silent else one.said


def _share(some: int, of: int) -> str:
    return f"{some / of:.0%}" if of else "-"
