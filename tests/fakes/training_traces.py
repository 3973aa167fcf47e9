"""Tables of a pipeline's operations with a known slow-down, by plain arithmetic.

Written apart from `benchmarks/straggler_traces` and from the replay that is tested with it. A rank
is a list of calls; a call begins when its rank is through with the last one, and a transfer ends
once all of its ranks have begun. As other people's tables have it: no groups, times in single
precision from the beginning of each step, -1 for none, transfers that are made together, waits for
ranks that are not in the table, a clip of gradients that all ranks wait in.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
KINDS = ("even", "uneven sequences", "slow stage", "slow rank", "slow link", "gc pauses")
_LINK_S, _GRADS_S, _CLIP_S = 0.005, 0.08, 0.002
_HEAD = [
    "rank", "dp_rank", "stage", "step", "optype", "start_ts", "duration", "mb_id", "seq_id",
]  # fmt: skip


@dataclass(frozen=True)
class MadeTraining:
    """How long each computation takes, and what is wrong."""

    kind: str
    forward_s: Array
    """Steps × data × stages × microbatches; backwards as well."""
    backward_s: Array
    pause_s: Array
    """Steps × data × stages."""
    link_s: Array
    """Data × stages, to the next stage."""
    culprit: int = -1
    """The rank, or the first rank of the link, or the stage."""

    @property
    def alike(self) -> "MadeTraining":
        """The same with all ranks alike."""
        times = (self.forward_s, self.backward_s, self.pause_s)
        ahead, back, pause = (np.full(part.shape, part.mean()) for part in times)
        link = np.full(self.link_s.shape, np.median(self.link_s))
        return replace(self, forward_s=ahead, backward_s=back, pause_s=pause, link_s=link)

    @property
    def slowdown(self) -> float:
        """How much longer it takes than with all ranks alike."""
        return _length(self) / _length(self.alike)


def made(kind: str, seed: int) -> MadeTraining:
    """A training of 2 to 4 stages in which something, or nothing, is slow."""
    random = np.random.default_rng([KINDS.index(kind), seed])
    stages, data = int(random.integers(2, 5)), int(random.integers(4, 9))
    shape = (int(random.integers(12, 25)), data, stages, int(random.integers(stages, 9)))
    ahead, back = 0.1 * random.lognormal(0, 0.01, (2, *shape)) * [[[[[1.0]]]], [[[[2.0]]]]]
    pause, link, culprit = np.zeros(shape[:3]), np.full((data, stages), _LINK_S), -1
    if kind == "uneven sequences":
        length = random.lognormal(0, 0.3, (shape[0], data, 1, shape[3]))
        ahead, back = ahead * length, back * length**1.2
    elif kind == "slow stage":
        culprit = int(random.integers(0, stages))
        for times in (ahead, back):
            times[:, :, culprit] *= 1.4
    elif kind == "slow rank":
        row, stage = int(random.integers(data)), int(random.integers(stages))
        culprit = stage * data + row
        for times in (ahead, back):
            times[:, row, stage] *= random.uniform(1.2, 2.0)
    elif kind == "slow link":
        row, stage = int(random.integers(data)), int(random.integers(stages - 1))
        culprit, link[row, stage] = stage * data + row, _LINK_S * random.uniform(8, 16)
    elif kind == "gc pauses":
        pause = np.where(random.random(pause.shape) < 0.1, random.uniform(0.1, 0.3), 0.0)
    return MadeTraining(kind, ahead, back, pause, link, culprit)


def columns(training: MadeTraining) -> dict[str, list[Any]]:
    """The table."""
    rows = list(_rows(training))
    first: dict[int, float] = defaultdict(lambda: np.inf)
    for row in rows:
        first[row[3]] = min(first[row[3]], row[5])
    for row in rows:
        row[5], row[6] = float(np.float32(row[5] - first[row[3]])), float(np.float32(row[6]))
    return dict(zip(_HEAD, map(list, zip(*rows, strict=True)), strict=True))


def _length(training: MadeTraining) -> float:
    ends: dict[int, float] = defaultdict(float)
    for row in _rows(training):
        ends[row[0]] = max(ends[row[0]], row[5] + row[6])
    return float(np.mean(list(ends.values())))


_Call = tuple[str, float, int, tuple[Any, ...], int]
"""Name, seconds, microbatch, the key that its ranks share, how many of these there are."""


class _Part:
    """The calls of one rank in one step; those in a list are made together."""

    def __init__(self, training: MadeTraining, step: int, row: int, stage: int) -> None:
        self._training, self._step, self._row, self._stage = training, step, row, stage
        _, self._data, self._stages, self._batches = training.forward_s.shape

    def calls(self) -> Iterator[list[_Call]]:
        early = min(self._stages - 1 - self._stage, self._batches)
        yield [("params-all-gather", _LINK_S, -1, ("params", self._stage), self._data)]
        for batch in range(early):
            yield self._moved("forward", "recv", batch)
            yield self._computed("forward", batch)
            yield self._moved("forward", "send", batch)
        yield self._moved("forward", "recv", early)
        for batch in range(early, self._batches):
            back = batch - early
            yield self._computed("forward", batch)
            yield [*self._moved("forward", "send", batch), *self._moved("backward", "recv", back)]
            yield self._computed("backward", back)
            after = self._moved("forward", "recv", batch + 1)
            yield [*self._moved("backward", "send", back), *after]
        for back in range(self._batches - early, self._batches):
            yield self._moved("backward", "recv", back)
            yield self._computed("backward", back)
            yield self._moved("backward", "send", back)
        yield from self._end()

    def _moved(self, way: str, end: str, batch: int) -> list[_Call]:
        """A transfer, if there is another end; forwards from a stage to the next."""
        first = self._stage - ((way == "forward") == (end == "recv"))
        if not 0 <= first < self._stages - 1 or not 0 <= batch < self._batches:
            return []
        took = float(self._training.link_s[self._row, first])
        return [(f"{way}-{end}", took, -1, (way, self._row, first, batch), 2)]

    def _computed(self, way: str, batch: int) -> list[_Call]:
        times = self._training.forward_s if way == "forward" else self._training.backward_s
        took = float(times[self._step, self._row, self._stage, batch])
        return [(f"{way}-compute", took, batch, (), 1)]

    def _end(self) -> Iterator[list[_Call]]:
        pause_s = float(self._training.pause_s[self._step, self._row, self._stage])
        yield [("gc", pause_s, -1, (), 1)]
        if self._stage == self._stages - 1:
            yield [("", 0.0, -1, ("loss",), self._data)]  # not in the table
        yield [("layernorm-grads-all-reduce", 4e-5, -1, (), 1)]
        if self._stage in {0, self._stages - 1}:
            yield [("embedding-grads-all-reduce", 2 * _LINK_S, -1, ("embedding", self._row), 2)]
        yield [("grads-reduce-scatter", _GRADS_S, -1, ("grads", self._stage), self._data)]
        everybody = self._data * self._stages
        yield [("optimizer-clip-main-grad", _CLIP_S, -1, ("clip",), everybody)]
        yield [("optimizer", 5e-4, -1, (), 1)]


def _rows(training: MadeTraining) -> Iterator[list[Any]]:
    steps, data, stages, _ = training.forward_s.shape
    now = np.zeros(data * stages)
    for step in range(steps):
        todo = {
            rank: [
                some for some in _Part(training, step, rank % data, rank // data).calls() if some
            ]
            for rank in range(data * stages)
        }
        begun: dict[Any, dict[int, float]] = defaultdict(dict)
        while any(todo.values()):
            for rank, own in todo.items():
                while own and (ends := _ends(own[0], begun, rank, len(own), float(now[rank]))):
                    for call, end in zip(own.pop(0), ends, strict=True):
                        if call[0]:
                            start = float(now[rank])
                            yield [rank, rank % data, rank // data, step, call[0], start,
                                   end - start, call[2], 0]  # fmt: skip
                    now[rank] = max(ends)


def _ends(
    calls: list[_Call], begun: dict[Any, dict[int, float]], rank: int, left: int, now: float
) -> list[float]:
    """When these calls end; empty as long as one of their ranks has not begun."""
    keys = [call[3] or (rank, left) for call in calls]
    for key in keys:
        begun[key][rank] = now
    if any(len(begun[key]) < call[4] for key, call in zip(keys, calls, strict=True)):
        return []
    return [max(begun[key].values()) + call[1] for key, call in zip(keys, calls, strict=True)]
