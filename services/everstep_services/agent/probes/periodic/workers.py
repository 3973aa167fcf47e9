"""The processes in which probes run; each stays for the next probes."""

import asyncio
import os
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from everstep.messages.facts.health import CheckResult
from everstep_services.agent.probes.runner.process import ChecksProcess, ProbeRun
from everstep_services.agent.probes.runner.protocol import Request
from everstep_services.agent.probes.settings import ChecksSettings
from everstep_services.agent.ranks import process_tree
from everstep_services.agent.runtime.rank_environment import without_logins


class ProbeWorkers:
    """At most `most` processes, each for one probe at a time; they stay for the next probes."""

    def __init__(self, settings: ChecksSettings, notes: Path | None, root: Path, most: int) -> None:
        self._settings = settings
        self._notes = notes
        self._root = root
        self._idle: list[ChecksProcess] = []
        self._room = asyncio.Semaphore(most)
        self._starts_free = most
        self._left: dict[str, int] = {}
        """For each probe, its last process, if that could not be killed."""

    async def run(self, name: str, within_s: float, own_pids: Collection[int] = ()) -> ProbeRun:
        """Run one check. A run without an answer in time is `unknown`; nothing is raised for it."""
        began = time.monotonic()
        async with self._room:
            left = self._left.get(name)
            if left is not None and await asyncio.to_thread(_is_there, left):
                reason = f"its last run has not ended: process {left} is stuck"
                unknown = CheckResult(check=name, state="unknown", reason=reason)
                return ProbeRun((unknown,), 0.0)
            self._left.pop(name, None)
            # without our logins, as programs of the site run below it
            environ = without_logins(os.environ)  # noqa: TID251  handed on, not read
            worker = self._idle.pop() if self._idle else ChecksProcess(environ)
            request = Request(
                names=(name,),
                settings=self._settings,
                notes=self._notes,
                until=0.0,
                root=self._root,
                own_pids=tuple(own_pids),
            )
            try:
                run = await worker.run(request, within_s)
            finally:
                if worker.is_usable:
                    self._idle.append(worker)
                else:
                    await worker.end()
            if not worker.is_gone and not worker.is_usable:
                self._left[name] = worker.pid
        return replace(self._paid(run), took_s=round(time.monotonic() - began, 4))

    def _paid(self, run: ProbeRun) -> ProbeRun:
        """A process that replaces one that a probe has spoiled is paid for by its probe."""
        if not run.start_cpu_s:
            return run
        self._starts_free -= 1
        if self._starts_free >= 0:
            return run
        return replace(run, cpu_s=run.cpu_s + run.start_cpu_s, start_cpu_s=0.0)

    async def end(self) -> None:
        """End all processes that run no probe."""
        while self._idle:
            await self._idle.pop().end()


def _is_there(pid: int) -> bool:
    return bool(process_tree.stat(pid))
