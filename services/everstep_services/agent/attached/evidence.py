"""Evidence of ranks that another launcher has started, as far as their parent is not needed."""

import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from everstep_services.agent.attached.attached_plan import AttachedPlan
from everstep_services.agent.collectors.collection import EvidenceFound, Piece, Scene
from everstep_services.agent.collectors.registry import collectors
from everstep_services.agent.output.log_files import tail
from everstep_services.agent.ranks.round_watch import RoundWatch
from everstep_services.agent.telemetry.evidence import TAIL_BYTES, Collections

_WITHIN_S = 5.0
"""For each kind. No restart waits for it: the launcher may end the other ranks at any time."""
_STREAMS = {"stderr": 2, "stdout": 1}


@dataclass(frozen=True, slots=True)
class _Output:
    """A file that a rank writes to, and its length when the rank came."""

    path: Path
    start: int


@dataclass(eq=False, repr=False)
class AttachedEvidence(Collections):
    """Collects from all ranks of this node as soon as one has failed by itself, or has stalled."""

    _plan: AttachedPlan
    _watch: RoundWatch

    def __post_init__(self) -> None:
        super().__post_init__()
        self._collectors = collectors(self._plan.agent.evidence_without).of_living
        self._outputs: dict[int, Mapping[str, _Output]] = {}

    def begins(self) -> None:
        """Forget the round before."""
        self._outputs.clear()

    def came(self, rank: int, pid: int) -> None:
        """Note the files that a rank writes to: they cannot be found once it is gone."""
        outputs: dict[str, _Output] = {}
        for name, number in _STREAMS.items():
            output = _output(pid, number)
            if output is not None and output not in outputs.values():
                outputs[name] = output
        self._outputs[rank] = outputs

    def collect_for(self, round: int, incident: str, rank: int) -> None:
        """A rank has failed, or has stalled: others may be ended at any moment."""
        ranks = self._watch.seen()
        environs = {rank.rank: self._plan.environ for rank in ranks}
        scene = Scene(ranks, _WITHIN_S, self._watch.began_s, environs, python=sys.executable)
        self.collect(round, incident, self._collectors, scene)
        ends = [
            self._end(rank, name, output) for name, output in self._outputs.get(rank, {}).items()
        ]
        self.collected(round, incident, [piece for piece in ends if piece is not None])

    def _end(self, rank: int, name: str, output: _Output) -> Piece | None:
        """The last output of a rank; nothing if others write into the same file."""
        text = tail(output.path, TAIL_BYTES, start=output.start).encode()
        if not text:
            return None
        others = (
            it for other, its in self._outputs.items() if other != rank for it in its.values()
        )
        is_shared = any(it.path == output.path for it in others)
        summary = f"{name}: the last {len(text)} bytes of {output.path}"
        return Piece("log", EvidenceFound(summary, text), rank=None if is_shared else rank)


def _output(pid: int, number: int) -> _Output | None:
    """The file behind a descriptor of a process; None for a terminal, a pipe, or a closed one."""
    try:
        about = os.stat(f"/proc/{pid}/fd/{number}")
        path = Path(os.readlink(f"/proc/{pid}/fd/{number}"))
    except OSError:
        return None
    return _Output(path, about.st_size) if stat.S_ISREG(about.st_mode) else None
