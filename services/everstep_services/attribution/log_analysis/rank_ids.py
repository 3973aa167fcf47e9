"""Which rank a process, a local rank or a task of srun is, as far as lines tell."""

import re
from collections.abc import Sequence

from everstep_services.attribution.log_analysis.attempts import Attempt
from everstep_services.attribution.log_analysis.origins import Origin
from everstep_services.attribution.log_analysis.report import Failure

_MOST = 20_000
_LOCAL = re.compile(r"(\d{1,4})$")
_BY_OTHERS = frozenset({"launcher_ends_ranks", "launcher_saw_kill", "launcher_saw_exit", "aborted"})
"""Rules of lines that others write about a rank."""


class RankIds:
    """The ranks of all files, and their other names."""

    def __init__(self, world: int | None) -> None:
        self._world = world
        self._processes: dict[str, int] = {}
        self._locals: dict[tuple[int, str], int] = {}
        self.ranks: set[int] = set()
        """Those with lines that mean anything."""
        self._tasks_are_ranks = True
        self._last_task = 0

    def see(self, origin: Origin) -> None:
        """Take the origin of a line."""
        task = origin.member.removeprefix("task ") if origin.member.startswith("task ") else ""
        if task:
            self._last_task = max(self._last_task, int(task))
        if origin.rank is not None and len(self.ranks) < _MOST:
            self.ranks.add(origin.rank)
            self._tasks_are_ranks &= not task or int(task) == origin.rank

    def set_process(self, pid: str, rank: int | None) -> None:
        """A process is a rank, if that is known."""
        if rank is not None and len(self._processes) < _MOST:
            self._processes[pid] = rank

    def set_local(self, file: int, local: str, rank: int) -> None:
        """A local rank in a file is a rank."""
        if len(self._locals) < _MOST:
            self._locals[file, local] = rank

    @property
    def _has_rank_tasks(self) -> bool:
        """Whether srun's tasks are the ranks: no line contradicts it; no rank is beyond them."""
        return self._tasks_are_ranks and max(self._locals.values(), default=0) <= self._last_task

    def with_rank(self, failure: Failure) -> Failure:
        """The failure with its rank, if its process, local rank or task shows it."""
        if failure.rank is not None:
            return failure
        rank = self._processes.get(failure.pid)
        if rank is None and (local := _LOCAL.search(failure.member)):
            rank = self._locals.get((failure.file, local[1]))
            if rank is None and failure.member.startswith("task ") and self._has_rank_tasks:
                rank = int(local[1])
        return failure if rank is None else failure.of_rank(rank)

    def silent(self, attempts: Sequence[Attempt], accused: Sequence[int]) -> tuple[int, ...]:
        """The ranks without any line of a failure, up to the highest known rank."""
        failed = {
            rank
            for attempt in attempts
            for (rank, _), kept in attempt.kept.items()
            if rank is not None and any(rule not in _BY_OTHERS for rule in kept.rules)
        }
        world = self._world or max([*self.ranks, *accused, 0]) + 1
        if len(failed) < max(2, world - 2):
            return ()
        return tuple(rank for rank in range(world) if rank not in failed)
