"""Straggler's real answers about a job of many ranks, whose windows its real judge has heard."""

import argparse
import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np

from benchmarks.straggler_windows import SECTIONS
from everstep.bus import BusSettings, connect
from everstep.clock import SystemClock
from everstep.messages import NodeTimings, RankTiming, SectionTiming
from everstep_services.straggler.answers import StragglerAnswers
from everstep_services.straggler.domain.job import JobJudge
from everstep_services.straggler.domain.rules import LiveRules
from everstep_services.straggler.jobs import Jobs
from everstep_services.straggler.judgements import JobWork, JudgementRunner
from tests.unit.messages.sketches import sketch_of

_STEPS, _PER_NODE, _KINDS = 16, 8, 20
_WINDOW_S = 2.1


def heard(job: str, ranks: int, windows: int) -> JobJudge:
    """A judge that has heard this number of windows of all ranks."""
    random = np.random.default_rng(1)
    kinds = [
        tuple(
            SectionTiming(section=name, wall=spread, cpu=spread)
            for name, length in SECTIONS.items()
            for spread in [
                sketch_of(random.normal(length * (1 + i / 50), length / 50, _STEPS).tolist())
            ]
        )
        for i in range(_KINDS)
    ]
    judge, nodes = JobJudge(job, LiveRules()), ranks // _PER_NODE
    for window in range(windows):
        for node in range(nodes):
            judge.hear(
                NodeTimings(
                    job=job, node=f"gpu-{node:04d}", round=1, slot=node, slots=nodes, world=ranks,
                    first_step=window * _STEPS + 1, last_step=(window + 1) * _STEPS,
                    window_s=_WINDOW_S,
                    ranks=tuple(
                        RankTiming(
                            rank=node * _PER_NODE + i, steps=_STEPS, window_s=_WINDOW_S,
                            sections=kinds[(node * 7 + i * 3 + window) % _KINDS],
                        )
                        for i in range(_PER_NODE)
                    ),
                ),
                float(window),
            )  # fmt: skip
        judge.close_due(float(window))
    return judge


@asynccontextmanager
async def answering(bus: BusSettings, judge: JobJudge) -> AsyncIterator[None]:
    """Questions about the judge's job are answered on the bus."""
    tracked = SimpleNamespace(job=judge.job, work=JobWork(judge, 1), is_by_time=False)
    jobs = cast("Jobs", SimpleNamespace(get={judge.job: tracked}.get))
    clock = SystemClock()
    async with connect(bus, "straggler") as client:
        answers = StragglerAnswers(client, clock, jobs, JudgementRunner(clock))
        task = asyncio.ensure_future(answers.answer_for_ever())
        try:
            await answers.open.wait()
            yield
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _serve(asked: argparse.Namespace) -> None:
    judge = heard(asked.job, asked.ranks, asked.windows)
    settings = BusSettings(url=asked.bus, credentials_file=asked.credentials)
    async with answering(settings, judge):
        print("ready", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--bus", required=True)
    words.add_argument("--credentials", type=Path, required=True)
    words.add_argument("--job", required=True)
    words.add_argument("--ranks", type=int, required=True)
    words.add_argument("--windows", type=int, required=True)
    asyncio.run(_serve(words.parse_args()))
