"""Examines this node in a process of its own, within a time limit, whatever happens there."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from everstep_services.agent.probes.runner.process import ChecksProcess
from everstep_services.agent.probes.runner.protocol import Request
from everstep_services.agent.probes.settings import ChecksSettings
from everstep_services.agent.probes.verdicts import NodeExamination


@dataclass(frozen=True, slots=True)
class NodeExaminer:
    """Examines this node. No failure of a check is raised here."""

    settings: ChecksSettings
    notes: Path | None = None
    """The file for the notes of checks, for this node alone."""
    root: Path = Path("/")

    async def examine(
        self,
        names: Sequence[str],
        occasion: str,
        *,
        within_s: float | None = None,
        own_pids: Collection[int] = (),
    ) -> NodeExamination:
        """Run these checks in parallel. A check that has not answered in time is `unknown`.

        On cancellation it leaves no process behind.
        """
        began = time.monotonic()
        limit_s = self.settings.all_within_s if within_s is None else within_s
        request = Request(
            names=tuple(names),
            settings=self.settings,
            notes=self.notes,
            until=0.0,
            root=self.root,
            own_pids=tuple(own_pids),
        )
        process = ChecksProcess()
        try:
            run = await process.run(request, limit_s)
        finally:
            await process.end()
        took_s = round(time.monotonic() - began, 3)
        return NodeExamination(occasion, run.checks, run.results, took_s)
