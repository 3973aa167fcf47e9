"""What straggler answers over a real bus."""

import json
from pathlib import Path

import pytest

from everstep.bus.client import NatsBus
from everstep.bus.errors import AskRefusedError
from everstep.clock import SystemClock
from everstep.messages import (
    ClockReading,
    HeatMapPart,
    RankScoreTable,
    ReadClock,
    ShowHeatMap,
    ShowScores,
    ShowSwitches,
    ShowTimings,
    SwitchTable,
    TimingTable,
)
from everstep.messages.base import Question
from everstep_services.agent.timings.rank_spreads import RankSpreads
from everstep_services.health.nodes.control import blank, switched
from tests.integration.straggler.replicas import Nodes, at_work, found, switch
from tests.waiting import until_async
from trainer_sdk import layout


async def test_what_is_asked_is_answered_in_one_message(
    bus: NatsBus, job: str, tmp_path: Path
) -> None:
    nodes = Nodes(bus, job)
    async with at_work(bus):
        nodes.send("n1")
        await found(bus, job, 1)
        scores = await bus.ask(
            "straggler", "scores", ShowScores(job=job, most=1), RankScoreTable, job=job, within_s=30
        )
        assert [(one.rank, one.slower_ratio) for one in scores.ranks] == [(1, 1.0)]
        assert scores.window_steps == 100
        spreads = RankSpreads(job, bus, SystemClock(), lambda: tmp_path)
        await spreads.tell()
        file = tmp_path / layout.SPREADS_FILE
        assert not file.exists(), "no tracker of the script wants them"
        file.touch()
        await spreads.tell()
        assert json.loads(file.read_text())["score/own/min"] == 0.5
        ask = ShowTimings(job=job, most_ranks=10**9, first_rank=-5)
        table = await bus.ask("straggler", "timings", ask, TimingTable, job=job, within_s=30)
        assert (len(table.rows), table.next_rank) == (1024, 1024), "halved until it fits"
        picture = ShowHeatMap(job=job, first_rank=3)
        part = await bus.ask("straggler", "heat_map", picture, HeatMapPart, job=job, within_s=30)
        assert (part.first_rank, part.next_rank, part.nodes[0].ranks) == (3, 16_387, 16_384)
        first, second = [
            await bus.ask(
                "straggler", "clock", ReadClock(job=job), ClockReading, job=job, within_s=30
            )
            for _ in range(2)
        ]
        assert first.clock == second.clock != ""
        assert second.at_s >= first.at_s > 1.7e9


@pytest.mark.parametrize(
    ("verb", "question", "said"),
    [
        ("scores", ShowScores(job="nobody"), "no timings of nobody have arrived"),
        ("timings", ShowTimings(job="nobody"), "no timings of nobody have arrived"),
        ("heat_map", ShowHeatMap(job="nobody"), "no timings of nobody have arrived"),
    ],
)
async def test_a_job_that_is_not_known_is_refused_in_one_line(
    bus: NatsBus, verb: str, question: Question, said: str
) -> None:
    async with at_work(bus):
        with pytest.raises(AskRefusedError, match=said):
            await bus.ask("straggler", verb, question, RankScoreTable, job="nobody", within_s=30)


async def test_a_measure_that_is_not_known_is_refused(bus: NatsBus, job: str) -> None:
    async with at_work(bus) as straggler:
        Nodes(bus, job).send()
        await until_async(lambda: straggler.jobs.get(job), "the job is known")
        ask = ShowTimings(job=job, measure="mood")
        with pytest.raises(AskRefusedError, match="'mood' is not measured: use one of own, ratio"):
            await bus.ask("straggler", "timings", ask, TimingTable, job=job, within_s=30)


async def test_every_switch_is_shown_with_its_source(bus: NatsBus, job: str) -> None:
    """Also about a job without any message (A6.5)."""
    await switch(bus, job, switched(blank(), {"straggler.stop_reports": "3"}, "ann", "r"))
    async with at_work(bus):
        question = ShowSwitches(job=job)
        of = SwitchTable
        table = await bus.ask("straggler", "switches", question, of, job=job, within_s=30)
    found = {one.name: (one.value, one.source) for one in table.switches}
    assert found["straggler.stop_reports"] == ("3", "control of the job")
    assert found["straggler.window_s"] == ("10", "default")
