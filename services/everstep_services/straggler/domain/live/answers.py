"""Answers about a live job: scores of its ranks, tables of timings, gauges."""

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np

from everstep.messages import (
    GroupScores,
    HeatMapPart,
    NodeRun,
    RankScores,
    RankScoreTable,
    RankSpread,
    Score,
    ShowHeatMap,
    ShowTimings,
    TimingRow,
    TimingTable,
)
from everstep_services.straggler.domain.arrays import dense, means_by, medians_by
from everstep_services.straggler.domain.live.measures import Measured
from everstep_services.straggler.domain.live.round import LiveRound
from everstep_services.straggler.domain.live.samples import SHOWN_SIGNALS, GroupIdentity
from everstep_services.straggler.domain.operations import Array

_MOST_GROUPS = 100
_MOST_ROWS = 4096
_MOST_WINDOWS = 1000
_CELLS_A_PART = 300_000
"""Two bytes each, in base64: they fit into a message, with the names of nodes."""
_CELL_MOST = 65_535


def score_table(round_: LiveRound, most: int, role: str) -> RankScoreTable:
    """How the ranks compare in the newest window, the slowest first."""
    measured = round_.newest
    if measured is None:
        return RankScoreTable(round=round_.number, window=0, ranks=(), said="no window yet")
    sample = measured.sample
    rows = np.arange(len(sample.rank))
    if role:
        wanted = [number for number, name in enumerate(measured.roles) if name == role]
        rows = rows[np.isin(measured.role, wanted)]
    slower = round_.slower[sample.rank]
    order = rows[np.argsort(-np.nan_to_num(slower[rows], nan=-np.inf), kind="stable")]
    notes = [measured.missing, _too_few(measured)]
    return RankScoreTable(
        round=round_.number,
        window=sample.last_step,
        ranks=tuple(_ranks(round_, measured, order[: max(0, most)])),
        ranks_seen=int(np.isfinite(measured.own_s).sum()),
        slowdown_ratio=None if round_.cost is None else round_.cost.slowdown_ratio,
        groups=_groups(measured, round_.meter.names.groups.names()),
        step_s=_known(measured.step_s),
        clock_error_s=measured.clock_error_s,
        ranks_missing=max(0, round_.windows.world - len(sample.rank)),
        said="; ".join(note for note in notes if note),
        spreads=tuple(_spreads(measured, rows)),
    )


def _spreads(measured: Measured, rows: Array) -> Iterator[RankSpread]:
    """The least, middle and largest value of each figure."""
    usual_s = _by_role(measured, measured.own_s)[measured.role]
    figures = {
        "own_s": measured.own_s,
        "score/own": usual_s / np.where(measured.own_s > 0, measured.own_s, np.nan),
        "score/gpu": measured.gpu_relative,
    }
    for column, name in enumerate(measured.sections.names):
        figures[f"section/{name or 'step'}_s"] = measured.sections.medians[:, column]
        figures[f"score/section/{name or 'step'}"] = measured.relative[:, column]
    for name, values in figures.items():
        present = values[rows][np.isfinite(values[rows])]
        if present.size:
            three = present.min(), np.median(present), present.max()
            yield RankSpread(name=name[:512], values=tuple(map(float, three)))


def no_scores() -> RankScoreTable:
    """The answer while nothing was heard."""
    return RankScoreTable(round=0, window=0, ranks=(), said="this job has sent nothing")


def _known(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def _too_few(measured: Measured) -> str:
    counts = np.bincount(measured.role[np.isfinite(measured.own_s)], minlength=len(measured.roles))
    small = [
        name for name, count in zip(measured.roles, counts, strict=True) if 0 < count < 3
    ]  # fmt: skip
    if not small:
        return ""
    return f"{_some(small)}: fewer than 3 ranks to compare, so none is judged"


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more roles" if len(names) > 3 else shown


@dataclass(frozen=True, slots=True)
class _Signal:
    """A signal of all rows, computed once: a job may have 100 000 ranks. NaN is not known."""

    name: str
    relative: Array
    individual: Array
    value_s: Array
    usual_s: Array

    def of(self, row: int) -> Iterator[Score]:
        """The score of a row, if it has the signal."""
        if np.isfinite(self.value_s[row]) or np.isfinite(self.relative[row]):
            yield Score(
                signal=self.name[:512],
                relative_score=_known(self.relative[row]),
                individual_score=_known(self.individual[row]),
                value_s=_known(self.value_s[row]),
                reference_s=_known(self.usual_s[row]),
            )


def _signals(measured: Measured) -> Iterator[_Signal]:
    nothing, sections = np.full(len(measured.role), np.nan), measured.sections
    usual_s = _by_role(measured, measured.own_s)[measured.role]
    yield _of_time("own", np.where(measured.own_s > 0, measured.own_s, np.nan), usual_s)
    for column, name in enumerate(sections.names):
        medians = sections.medians[:, column]
        lowest = np.full(len(medians), np.fmin.reduce(medians))
        relative, individual = measured.relative[:, column], measured.individual[:, column]
        yield _Signal(f"section:{name or 'step'}", relative, individual, medians, lowest)
    yield _Signal("gpu", measured.gpu_relative, measured.gpu_individual, nothing, nothing)
    for name, of in SHOWN_SIGNALS.items():
        values = measured.per_step(of)
        yield _of_time(name, values, _by_role(measured, values)[measured.role])


def _of_time(name: str, value_s: Array, usual_s: Array) -> _Signal:
    """The signal of a time: its score is what is usual in the role over the own value."""
    with np.errstate(over="ignore"):  # a node may send any value
        ratio = usual_s / np.where(value_s > 0, value_s, np.nan)
    known_s = np.where(np.isfinite(value_s), usual_s, np.nan)
    return _Signal(name, ratio, np.full(len(value_s), np.nan), value_s, known_s)


def _by_role(measured: Measured, values: Array) -> Array:
    is_finite = np.isfinite(values)
    return medians_by(measured.role[is_finite], values[is_finite], len(measured.roles))


def _ranks(round_: LiveRound, measured: Measured, rows: Array) -> Iterator[RankScores]:
    sample, slow, signals = measured.sample, frozenset(round_.slow()), list(_signals(measured))
    for row in rows.tolist():
        rank = int(sample.rank[row])
        yield RankScores(
            rank=rank,
            node=sample.nodes[int(sample.node[row])].node,
            role=measured.roles[int(measured.role[row])],
            scores=tuple(score for signal in signals for score in signal.of(row)),
            is_straggler=rank in slow,
            own_s=_known(measured.own_s[row]),
            slower_ratio=_known(round_.slower[rank]),
            lateness_s=_known(measured.late_s[row]),
            waited_s=_known(measured.waited_s[row]),
        )


def _groups(measured: Measured, names: list[object]) -> tuple[GroupScores, ...]:
    """The groups in which ranks wait the longest."""
    if measured.entered is None:
        return ()
    matched, waits = measured.entered.entries, measured.entered.waits
    waited = np.where(waits, matched.last_s - matched.at_s, 0.0)
    size = int(matched.group.max()) + 1
    total = np.bincount(matched.group, weights=waited, minlength=size)
    count = np.bincount(matched.group, minlength=size)
    worst = np.argsort(-total / np.maximum(count, 1), kind="stable")[:_MOST_GROUPS]
    rows = []
    for group in worst[count[worst] > 0]:
        at = np.flatnonzero(matched.group == group)
        rows.append(_group(measured, at, waited[at], names[int(group)]))
    return tuple(rows)


def _group(measured: Measured, at: Array, waited: Array, name: object) -> GroupScores:
    assert measured.entered is not None
    matched = measured.entered.entries
    row, index = np.unique(matched.row[at], return_inverse=True)
    steps = np.bincount(matched.row, weights=matched.to_next_s)[row] / measured.step_s
    by_row = np.bincount(index, weights=waited) / np.where(steps > 0, steps, np.nan)
    last_rank, last_ratio = _last(measured, at, waited)
    median = float(np.nanmedian(by_row)) if np.isfinite(by_row).any() else 0.0
    return GroupScores(
        group=name.name if isinstance(name, GroupIdentity) else "",
        ranks=len(row),
        last_rank=last_rank,
        last_ratio=last_ratio,
        waited_s=median,
    )


def _last(measured: Measured, at: Array, waited: Array) -> tuple[int, float]:
    """The rank that is waited for the most often, and the share of times that it is."""
    assert measured.entered is not None
    matched, ranks = measured.entered.entries, measured.sample.rank
    if matched.is_transfer[at[0]]:
        # The peers wait for the rank that waits the least for them.
        rows, index = dense(matched.row[at])
        least = int(np.argmin(means_by(index, waited, len(rows))))
        share = float((waited[index == least] <= np.median(waited)).mean())
        return int(ranks[rows[least]]), share
    cells = np.unique(matched.cell[at])
    last, times = np.unique(ranks[matched.last_row[cells]], return_counts=True)
    return int(last[np.argmax(times)]), float(times.max() / len(cells))


def timing_table(round_: LiveRound, question: ShowTimings) -> TimingTable:
    """Ranks by windows."""
    most = max(0, min(question.most_ranks, _MOST_ROWS))
    ranks, values, about = _shown(round_, question, most)
    return TimingTable(rows=_rows(round_, values, ranks), **about)


def heat_map_part(round_: LiveRound, question: ShowHeatMap, most_ranks: int) -> HeatMapPart:
    """Ranks by windows, in two bytes a cell."""
    windows = max(1, min(question.most_windows, len(round_.history.windows)))
    most = max(1, min(most_ranks, _CELLS_A_PART // windows))
    ranks, values, about = _shown(round_, question, most)
    low, high, cells = _cells(values)
    return HeatMapPart(
        first_rank=ranks.start,
        nodes=_node_runs(round_, ranks),
        low=low,
        high=high,
        cells=base64.b64encode(cells.T.tobytes()).decode(),
        **about,
    )


def _shown(
    round_: LiveRound, question: ShowTimings | ShowHeatMap, most_ranks: int
) -> tuple[range, Array, dict[str, Any]]:
    """The ranks to show, their values by window, and what all answers say about them."""
    history, meter = round_.history, round_.meter
    sections = [str(name) for name in meter.names.sections.names()]
    number = sections.index(question.section) if question.section in sections else -1
    windows = max(0, min(question.most_windows, _MOST_WINDOWS))
    first = min(max(0, question.first_rank), meter.world)
    last = min(meter.world, first + most_ranks)
    values = history.table(question.measure, number, windows, slice(first, last))
    about: dict[str, Any] = {
        "round": round_.number,
        "measure": question.measure,
        "windows": tuple(
            (window.first_step, window.last_step)
            for window in (list(history.windows)[-windows:] if windows else [])
        ),
        "next_rank": last if last < meter.world else None,
        "sections": tuple(sections),
    }
    return range(first, last), values, about


def _cells(values: Array) -> tuple[float, float, np.ndarray[Any, np.dtype[np.uint16]]]:
    """The lowest and the highest value, and each value between them as a number from 1 on."""
    is_finite = np.isfinite(values)
    low, high = (
        (float(values[is_finite].min()), float(values[is_finite].max()))
        if is_finite.any()
        else (0.0, 0.0)
    )
    scale = (_CELL_MOST - 1) / (high - low) if high > low else 0.0
    placed = np.where(is_finite, (np.where(is_finite, values, low) - low) * scale + 1, 0)
    return low, high, placed.round().astype("<u2")


def _node_runs(round_: LiveRound, ranks: range) -> tuple[NodeRun, ...]:
    measured = round_.newest
    if measured is None:
        return ()
    names = [""] * len(ranks)
    sample = measured.sample
    for rank, node in zip(sample.rank.tolist(), sample.node.tolist(), strict=True):
        if rank in ranks:
            names[rank - ranks.start] = sample.nodes[node].node
    return tuple(NodeRun(node=name, ranks=len(list(run))) for name, run in groupby(names))


def _rows(round_: LiveRound, values: Array, ranks: range) -> tuple[TimingRow, ...]:
    measured = round_.newest
    if measured is None:
        return ()
    row_of = {int(rank): row for row, rank in enumerate(measured.sample.rank)}
    rows = []
    for place, rank in enumerate(ranks):
        row = row_of.get(rank)
        is_sampled = row is not None
        node = measured.sample.nodes[int(measured.sample.node[row])].node if is_sampled else ""
        role = measured.roles[int(measured.role[row])] if is_sampled else ""
        column = values[:, place].tolist() if len(values) else []
        shown = tuple(value if value == value else None for value in column)
        rows.append(TimingRow(rank=rank, node=node, role=role, values=shown))
    return tuple(rows)


def gauges(round_: LiveRound | None) -> Mapping[str, float]:
    """The gauges of a job, without a label for each rank; names without a value are left out."""
    if round_ is None or round_.newest is None:
        return {}
    measured = round_.newest
    gauges_ = {
        "windows": float(round_.closed),
        "slow_ranks": float(len(round_.slow())),
        "missing_ranks": float(max(0, round_.windows.world - len(measured.sample.rank))),
    }
    for name, values in (
        ("own_seconds", measured.own_s),
        ("ratio", round_.slower[measured.sample.rank]),
        ("waited_seconds", measured.waited_s),
    ):
        finite = values[np.isfinite(values)]
        if len(finite):
            gauges_ |= {
                f"{name}_min": float(finite.min()),
                f"{name}_median": float(np.median(finite)),
                f"{name}_max": float(finite.max()),
            }
    if np.isfinite(measured.step_s):
        gauges_["step_seconds"] = measured.step_s
    return gauges_
