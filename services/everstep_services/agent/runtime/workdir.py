"""The folders, files and console of one agent on its node."""

import contextlib
import os
import shutil
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from datetime import UTC, datetime
from pathlib import Path

from everstep.errors import EverstepError
from everstep.messages import StartRanks
from everstep.observe.printable import printable
from everstep_services.agent.output.console import Console, Rank, Screen, opened_console
from everstep_services.agent.output.log_files import STREAMS, LogFiles, LogOwner
from everstep_services.agent.ranks.protocol import NodePlan, RankSeen, rank_folder
from everstep_services.agent.run_plan import RunPlan
from everstep_services.agent.runtime.rank_environment import (
    RankPaths,
    environment,
    shared_and_own,
    without_logins,
)
from trainer_sdk import layout, wire
from trainer_sdk.bootstrap.torch_hooks import arm_flight_recorder

_DRAIN_WITHIN_S = 5.0
_FORGE_WITHIN_S = 60.0
"""How long ranks wait for a forge that still imports; then they start cold."""
_NVRX_LAUNCHED, _NVRX_CYCLE_BEGAN = "NVRX_LAUNCH_TIME", "NVRX_CYCLE_START_TIME"
_OF_A_RANK = (
    layout.PAGE_VARIABLE, layout.FOLDER_VARIABLE, layout.ROUND_VARIABLE,
    _NVRX_LAUNCHED, _NVRX_CYCLE_BEGAN,
)  # fmt: skip


class UnsafeFolderError(EverstepError):
    """A folder for sockets belongs to another user."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path} belongs to another user, so sockets in it would not be safe: remove it, or "
            f"set XDG_RUNTIME_DIR to a folder of yours"
        )


def private_dir(path: Path) -> Path:
    """The folder, made for this user only."""
    path.mkdir(mode=0o700, exist_ok=True)
    about = path.lstat()
    if about.st_uid != os.geteuid() or not path.is_dir() or path.is_symlink():
        raise UnsafeFolderError(path)
    if about.st_mode & 0o077:
        path.chmod(0o700)
    return path


class Workdir:
    """Use `Workdir.opened`. Call methods that block on a disk in a thread."""

    def __init__(
        self, plan: RunPlan, runtime: Path, base: Mapping[str, str], images: Path | None
    ) -> None:
        self._plan = plan
        self._runtime = runtime
        self._round_over_at: float | None = None
        """When the ranks of the last round had stopped here: the next round forms from then on."""
        self._base = without_logins(base)
        self._console: Console | None = None
        self._images = images
        """Where ranks keep their states in memory."""
        self.logs = LogFiles(plan.log_dir, plan.job)

    @classmethod
    @contextmanager
    def opened(
        cls, plan: RunPlan, runtime: Path, base: Mapping[str, str], images: Path | None
    ) -> Iterator["Workdir"]:
        """Yield a workdir, and remove its runtime directory afterwards."""
        try:
            yield cls(plan, runtime, base, images)
        finally:
            shutil.rmtree(runtime, ignore_errors=True)

    @asynccontextmanager
    async def console_following(self) -> AsyncIterator[None]:
        """Show the output of ranks on this process's own streams."""
        wanted = self._plan.console.is_colored
        screens = (Screen(1, wanted and os.isatty(1)), Screen(2, wanted and os.isatty(2)))
        async with opened_console(self._plan.node, self._plan.console, screens) as console:
            self._console = console
            try:
                yield
            finally:
                self._console = None
                await console.drain(_DRAIN_WITHIN_S)

    @property
    def leaves_children(self) -> bool:
        """Processes that ranks have started may outlive a job that is done."""
        return self._plan.leave_children

    def cpus(self, local_rank: int) -> str:
        """The CPUs to which a rank is bound; empty without a binding."""
        bindings = self._plan.cpu_bindings
        return bindings[local_rank].cpu_list if local_rank < len(bindings) else ""

    @property
    def python(self) -> str:
        """The interpreter of the ranks."""
        return self._plan.command.python or sys.executable

    def environs(
        self, order: StartRanks, ranks: Iterable[RankSeen]
    ) -> Mapping[int, Mapping[str, str]]:
        """The environments with which these ranks were started, with flight recorders armed."""
        by_rank = {}
        for rank in ranks:
            paths = RankPaths(rank.folder / layout.ELASTIC_ERROR_FILE, self._images)
            local_rank = rank.rank - order.first_rank
            environ = environment(self._plan, order, local_rank, self._base, paths)
            if self._plan.command.kind != "program":
                arm_flight_recorder(environ, str(rank.folder))
            by_rank[rank.rank] = environ
        return by_rank

    def node_plan(self, instance: str) -> NodePlan:
        """The plan for the warden and the forge."""
        plan = self._plan
        shared, own = shared_and_own(plan, self._base, RankPaths(error_file=self._runtime))
        return NodePlan(
            instance=instance,
            runtime_dir=self._runtime,
            command=wire.RankCommand(
                kind=plan.command.kind, target=plan.command.target, arguments=plan.command.arguments
            ),
            cwd=Path.cwd(),
            environ=shared,
            own=(*own, *_OF_A_RANK),
            leaves=plan.leave_children,
            python=self.python,
            warm=plan.warm and plan.command.kind != "program",
            preload=plan.preload,
            address=plan.address,
        )

    def prepare(self, order: StartRanks) -> wire.WardenStart:
        """Make the files for the output of a round's ranks; return how to start the ranks."""
        return wire.WardenStart(
            round=order.round,
            ranks=tuple(self._rank(order, local) for local in range(order.ranks)),
            warm=self._plan.warm,
            forge_within_s=_FORGE_WITHIN_S,
        )

    def _rank(self, order: StartRanks, local_rank: int) -> wire.RankEntry:
        rank = order.first_rank + local_rank
        logs = self.logs.make(order.round, rank)
        error_file = rank_folder(self._runtime, order.round, rank) / layout.ELASTIC_ERROR_FILE
        paths = RankPaths(error_file=error_file, images=self._images)
        environ = environment(self._plan, order, local_rank, self._base, paths)
        if self._plan.stand_in:
            environ[_NVRX_LAUNCHED] = repr(datetime.now(UTC).timestamp())
            if self._round_over_at is not None:
                environ[_NVRX_CYCLE_BEGAN] = repr(self._round_over_at)
        return wire.RankEntry(
            rank=rank, environ=environ, stdout=str(logs / "stdout"), stderr=str(logs / "stderr")
        )

    def show(self, order: StartRanks) -> None:
        """Show the output of these ranks from now on."""
        assert self._console is not None
        for local_rank in range(order.ranks):
            rank = order.first_rank + local_rank
            starts = tuple(self.logs.start(order.round, rank, stream) for stream in STREAMS)
            self._console.follow(
                Rank(
                    rank=rank,
                    local_rank=local_rank,
                    folder=self.logs.folder(order.round, rank),
                    starts=(starts[0], starts[1]),
                    role=self._plan.role,
                    is_alone=order.world_size == 1,
                )
            )

    def hide(self) -> None:
        """Show the rest of what was written, and nothing later, without a wait."""
        assert self._console is not None
        self._round_over_at = datetime.now(UTC).timestamp()
        self._console.release()

    async def drain(self) -> None:
        """Wait until the rest is shown, for a few seconds at most."""
        assert self._console is not None
        await self._console.drain(_DRAIN_WITHIN_S)

    def describe(self, order: StartRanks, rank: int, pid: int) -> None:
        """Write next to the output whose it is."""
        about = LogOwner(
            job=self._plan.job,
            round=order.round,
            rank=rank,
            node=self._plan.node,
            slot=order.slot,
            local_rank=rank - order.first_rank,
            pid=pid,
            started_at=datetime.now(UTC),
        )
        with contextlib.suppress(EverstepError):  # the output itself matters more
            self.logs.say(about)

    def say(self, text: str, *, is_warning: bool = False) -> None:
        """Write a line of our own between those of the ranks, without a wait for the terminal."""
        # The reader may be gone, and the disk may be full: the ranks run on.
        with contextlib.suppress(OSError, ValueError):
            line = printable(f"everstep: {'warning: ' if is_warning else ''}{text}")
            if self._console is None:
                sys.stderr.write(f"{line}\n")
            else:
                self._console.say(line)

    def say_outlived(self, processes: Sequence[str], *, live_on: bool) -> None:
        """Show which processes that ranks had started have outlived them."""
        if processes:
            fate = "live on" if live_on else "were killed, as --leave-children was not given"
            named = "; ".join(processes)
            self.say(f"processes that ranks had started outlived them and {fate}: {named}")
