"""REST answers: slow ranks of the past by the record, and how ranks compare by who measures."""

import base64
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, get_args

import click
import httpx2
import msgspec
import numpy as np
import pytest

from everstep.bus.requests import RefusalError
from everstep.messages import (
    Fact,
    HeatMapPart,
    Message,
    NodeRun,
    RankScoreTable,
    ShowHeatMap,
    ShowScores,
    ShowTimings,
    StragglerFound,
    TimingTable,
)
from everstep.messages.facts.stragglers import Score
from everstep.messages.questions.straggler import GroupScores, RankScores, TimingRow
from everstep.slow_rank_causes import SlowRankCause
from everstep_services.cli.commands.jobs.stragglers import show
from tests.integration.conftest import Api
from tests.integration.history.test_rest_incidents import problem
from tests.integration.history.test_rest_lists import every_item, get
from tests.unit.history.facts import make

OWN = Score(signal="own", relative_score=0.8, value_s=0.5, reference_s=0.4)
TABLE = RankScoreTable(
    round=2,
    window=320,
    ranks=(
        RankScores(rank=3, node="n2", role="all", scores=(OWN,), is_straggler=True, own_s=0.5,
                   slower_ratio=0.25, lateness_s=0.1, waited_s=0.0),
        RankScores(rank=0, node="n1", role="all", own_s=0.4, slower_ratio=0.0, waited_s=0.1),
    ),
    ranks_seen=2,
    slowdown_ratio=0.2,
    groups=(GroupScores(group="dp", ranks=2, last_rank=3, last_ratio=0.9, waited_s=0.1),),
    step_s=0.5,
    window_steps=16,
    said="ranks 1 and 2 were not heard",
)  # fmt: skip


class Straggler:
    """Answers as straggler would, and keeps what it is asked."""

    def __init__(self, table: RankScoreTable = TABLE) -> None:
        self.asked: list[Message] = []
        self.parts: dict[int, HeatMapPart] = {}
        self._table = table

    async def scores(self, question: Message) -> Message:
        self.asked.append(question)
        return self._table

    async def timings(self, question: Message) -> Message:
        assert isinstance(question, ShowTimings)
        self.asked.append(question)
        return TimingTable(
            round=2,
            measure=question.measure,
            windows=((1, 16), (17, 32)),
            rows=(TimingRow(rank=question.first_rank, node="n1", role="all", values=(0.4, None)),),
            next_rank=question.first_rank + 1,
            sections=("", "data"),
        )

    async def heat_map(self, question: Message) -> Message:
        assert isinstance(question, ShowHeatMap)
        self.asked.append(question)
        return self.parts[question.first_rank]


def heat_map_part(
    first: int, nodes: tuple[tuple[str, int], ...], cells: list[int], **more: Any
) -> HeatMapPart:
    values: dict[str, Any] = {"low": 0.1, "high": 0.5, "windows": ((1, 16), (17, 32)), **more}
    return HeatMapPart(
        round=2, measure="own", first_rank=first, sections=("",),
        nodes=tuple(NodeRun(node=name, ranks=count) for name, count in nodes),
        cells=base64.b64encode(np.array(cells, "<u2").tobytes()).decode(), **values,
    )  # fmt: skip


@asynccontextmanager
async def answering(api: Api, straggler: Straggler) -> AsyncIterator[None]:
    verbs = {
        "scores": straggler.scores,
        "timings": straggler.timings,
        "heat_map": straggler.heat_map,
    }
    async with api.bus.answer("straggler", verbs):
        yield


def found(rank: int, number: int = 2, **more: Any) -> StragglerFound:
    said = {"node": f"n{rank}", "cause": "input", "scores": (OWN,), **more}
    fact = make("straggler_found", job="j", round=number, rank=rank, **said)
    assert isinstance(fact, StragglerFound)
    return fact


def cleared(finding: Fact, **more: Any) -> Fact:
    return make("straggler_cleared", job="j", round=2, finding=finding.id, **more)


def began(number: int) -> list[Fact]:
    formed = [make("round_formed", job="j", round=number)]
    return [*formed, make("round_started", job="j", round=number)]


async def ranks(reader: httpx2.AsyncClient, **query: Any) -> list[int]:
    return [one["rank"] for one in (await get(reader, "jobs/j/stragglers", **query))["items"]]


@pytest.mark.parametrize("actions", list(itertools.permutations(("exclude", "stop"))))
async def test_a_finding_has_all_that_was_done_about_it(
    api: Api, reader: httpx2.AsyncClient, actions: tuple[str, ...]
) -> None:
    """A node that is excluded and a job that is stopped for one rank are both shown."""
    slow = found(3)
    outcomes = {"exclude": "refused", "stop": "asked"}
    acted = [
        make("straggler_acted", job="j", round=2, finding=slow.id, action=action,
             outcome=outcomes[action], reason=f"why {action}")
        for action in actions
    ]  # fmt: skip
    await api.add(*began(2), slow, *acted, acted[0])
    (shown,) = (await get(reader, "jobs/j/stragglers"))["items"]
    said = {one["action"]: (one["outcome"], one["reason"]) for one in shown["actions"]}
    assert said == {"exclude": ("refused", "why exclude"), "stop": ("asked", "why stop")}
    assert shown["action"] in actions


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
async def test_a_finding_has_its_price_and_its_end_in_whatever_order_they_come(
    api: Api, reader: httpx2.AsyncClient, order: tuple[int, ...]
) -> None:
    """The finding names rank and cause, and its end comes once (A6.1)."""
    slow = found(3, reason="25 % above the median for 3 windows", slowdown_ratio=0.2)
    facts = [
        slow,
        make("straggler_acted", job="j", round=2, finding=slow.id, action="exclude",
             outcome="observed", reason="the mode is observe"),
        cleared(slow, lost_s=12.5, lasted_s=60.0, reason="2 % above the median"),
    ]  # fmt: skip
    await api.add(*began(2), *(facts[i] for i in order), facts[0], facts[2])
    (shown,) = (await get(reader, "jobs/j/stragglers"))["items"]
    assert (shown["id"], shown["state"], shown["rank"], shown["node"]) == (
        slow.id, "cleared", 3, "n3",
    )  # fmt: skip
    assert (shown["cause"], shown["slowdown_ratio"], shown["lost_s"]) == ("input", 0.2, 12.5)
    assert (shown["action"], shown["action_outcome"]) == ("exclude", "observed")
    assert shown["cleared_reason"] == "2 % above the median"
    assert shown["scores"][0]["relative_score"] == 0.8


async def test_findings_are_listed_newest_first_in_pages_and_filtered(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    first, second, third = found(1), found(2, cause="host"), found(3, node="n1")
    orphan = make("straggler_cleared", job="j", round=2, finding="never-heard-of")
    await api.add(*began(2), first, second, third, cleared(first), orphan)
    assert await ranks(reader) == [3, 2, 1]
    assert await ranks(reader, order="asc") == [1, 2, 3]
    assert await ranks(reader, state="open") == [3, 2]
    assert await ranks(reader, state="cleared") == [1]
    assert await ranks(reader, cause=["host", "network"]) == [2]
    assert await ranks(reader, node="n1") == [3, 1]
    assert await ranks(reader, rank=2, round=2) == [2]
    assert await ranks(reader, round=1) == []
    paged = await every_item(reader, "jobs/j/stragglers", limit=1)
    assert [one["rank"] for one in paged] == [3, 2, 1]
    assert (await problem(reader, "jobs/nobody/stragglers"))[:2] == (404, "not_found")
    assert (await problem(reader, "jobs/j/stragglers", state="slow"))[0] == 422
    assert (await problem(reader, "jobs/j/stragglers", rank="-1"))[0] == 422
    assert (await problem(reader, "jobs/j/stragglers", cause="zzz"))[0] == 422


async def test_every_cause_that_straggler_names_can_be_asked_for(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    causes = list(get_args(SlowRankCause))
    await api.add(*began(2), *(found(rank, cause=cause) for rank, cause in enumerate(causes)))
    assert await ranks(reader, cause=causes, order="asc") == list(range(len(causes)))
    choice = next(one for one in show.params if one.name == "cause").type
    assert isinstance(choice, click.Choice)
    assert list(choice.choices) == causes


async def test_a_finding_that_nobody_cleared_is_over_with_its_round(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    await api.add(*began(2), found(1))
    assert await ranks(reader, state="open") == [1]
    await api.add(make("round_ended", job="j", round=2))
    (shown,) = (await get(reader, "jobs/j/stragglers", state="cleared"))["items"]
    assert (shown["rank"], shown["cleared_reason"]) == (1, "its round is over")
    assert shown["cleared_at"] is not None


async def test_a_finding_of_a_round_that_another_followed_is_over(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    await api.add(*began(2), found(1), *began(3))
    assert await ranks(reader, state="open") == []
    assert await ranks(reader, state="cleared") == [1]


async def test_when_the_steps_of_all_changed_is_listed(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    await api.add(
        *began(2),
        make("progress_made", job="j", round=2, step=1000, is_first=True),
        make(
            "step_time_shifted", job="j", round=2, before_s=0.4, now_s=0.6, section="data", step=49
        ),
        make("step_time_shifted", job="j", round=3, before_s=0.6, now_s=0.4),
    )
    shown = (await get(reader, "jobs/j/step-shifts"))["items"]
    assert [(one["round"], one["now_s"]) for one in shown] == [(3, 0.4), (2, 0.6)]
    (only,) = (await get(reader, "jobs/j/step-shifts", round=2))["items"]
    assert (only["before_s"], only["section"]) == (0.4, "data")
    assert only["step"] == 1048, "of the training, not of the round"


async def test_ranks_are_compared_as_straggler_says_with_what_it_has_found(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """Rank, lateness and who waits for whom are in one answer (A6.1, A6.3)."""
    straggler = Straggler()
    await api.add(*began(2), found(3, section="data"))
    async with answering(api, straggler):
        shown = await get(reader, "jobs/j/stragglers/now", most=5, role="all")
    assert straggler.asked == [ShowScores(job="j", most=5, role="all")]
    assert [(one["rank"], one["is_straggler"]) for one in shown["ranks"]] == [(3, True), (0, False)]
    assert (shown["round"], shown["window"], shown["window_steps"]) == (2, 320, 16)
    assert (shown["slowdown_ratio"], shown["note"]) == (0.2, "ranks 1 and 2 were not heard")
    assert shown["ranks"][0]["scores"][0]["signal"] == "own"
    assert shown["groups"][0]["last_rank"] == 3
    assert [(one["rank"], one["section"]) for one in shown["found"]] == [(3, "data")]


async def test_times_come_as_ranks_by_windows_from_the_rank_that_is_asked_for(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    straggler = Straggler()
    await api.add(*began(2))
    async with answering(api, straggler):
        shown = await get(reader, "jobs/j/timings", first_rank=7, most_ranks=1, most_windows=2)
        assert shown["windows"][1] == {"first_step": 17, "last_step": 32}
        assert shown["rows"] == [{"rank": 7, "node": "n1", "role": "all", "values": [0.4, None]}]
        assert (shown["next_rank"], shown["measure"], shown["sections"]) == (8, "own", ["", "data"])
        shown = await get(reader, "jobs/j/timings", section="data")
        assert (shown["measure"], shown["section"]) == ("section", "data")
        for wrong in ({"measure": "section"}, {"measure": "own", "section": "data"}):
            assert (await problem(reader, "jobs/j/timings", **wrong))[:2] == (400, "bad_measure")
        assert (await problem(reader, "jobs/j/timings", measure="wall"))[0] == 422
        assert await problem(reader, "jobs/j/timings", section="nope") == (
            422, "no_such_section", "job j has no section 'nope': use one of data",
        )  # fmt: skip
    first, second, *_ = straggler.asked
    assert first == ShowTimings(job="j", first_rank=7, most_ranks=1, most_windows=2)
    assert second == ShowTimings(job="j", measure="section", section="data")


async def test_a_heat_map_is_one_picture_of_all_parts(api: Api, reader: httpx2.AsyncClient) -> None:
    """Two parts with scales of their own; a gap stays a gap, and a node goes on (A11.6)."""
    straggler = Straggler()
    straggler.parts = {
        0: heat_map_part(0, (("n1", 2),), [1, 65_535, 0, 65_535], next_rank=2),
        2: heat_map_part(2, (("n1", 1), ("n2", 1)), [1, 1, 65_535, 0], low=0.5, high=0.9),
    }
    await api.add(*began(2), make("progress_made", job="j", round=2, step=1000, is_first=True))
    await api.add(found(3), found(0, number=1))
    async with answering(api, straggler):
        answer = await reader.get("jobs/j/heat-map", params={"most_windows": 2})
    length = int.from_bytes(answer.content[:4], "little")
    header = msgspec.json.decode(answer.content[4 : 4 + length])
    assert header["ranks"] == [0, 1, 2, 3]
    assert header["nodes"] == [["n1", 3], ["n2", 1]]
    assert header["windows"] == [[1000, 1015], [1016, 1031]], "of the training, not of the round"
    assert header["found"] == [[3, "open"]]
    assert header["low"] == pytest.approx(0.3, abs=0.02)
    assert header["high"] == pytest.approx(0.7, abs=0.02)
    cells = answer.content[4 + length :]
    assert (cells[0], cells[2], cells[7]) == (1, 0, 0), "the lowest, and two gaps"
    assert cells[1] == cells[3] == cells[4] == cells[5] in range(120, 136), "the middle"
    assert cells[6] == 255
    assert straggler.asked == [
        ShowHeatMap(job="j", most_windows=2), ShowHeatMap(job="j", first_rank=2, most_windows=2)
    ]  # fmt: skip


async def test_a_heat_map_has_no_rank_whose_windows_are_older(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    """A window that begins between two questions shifts no row against the others."""
    straggler = Straggler()
    straggler.parts = {
        0: heat_map_part(0, (("n1", 1),), [1, 65_535], next_rank=1),
        1: heat_map_part(1, (("n2", 1),), [1, 65_535], windows=((17, 32), (33, 48))),
    }
    await api.add(*began(2), make("progress_made", job="j", round=2, step=1000, is_first=True))
    await api.add(found(3), found(0, number=1))
    async with answering(api, straggler):
        answer = await reader.get("jobs/j/heat-map", params={"most_windows": 2})
    length = int.from_bytes(answer.content[:4], "little")
    header = msgspec.json.decode(answer.content[4 : 4 + length])
    assert (header["ranks"], header["windows"]) == ([1], [[1016, 1031], [1032, 1047]])


async def test_a_heat_map_is_kept_when_straggler_has_forgotten_its_job(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    def drawn(first: int, node: str, **more: Any) -> Fact:
        part = heat_map_part(first, ((node, 1),), [1, 65_535])
        values = {"round": 2, "windows": part.windows, "low": 0.1, "high": 0.5, **more}
        cells = {"first_rank": first, "nodes": ((node, 1),), "cells": part.cells}
        return make("heat_map_drawn", job="j", is_by_time=False, **cells | values)

    await api.add(*began(2), drawn(0, "old", round=1), drawn(1, "n2"), drawn(0, "n1"), found(1))
    await api.add(drawn(0, "n1", cells="../etc"), drawn(0, "n1", nodes=(("n1", 2**40),)))
    answer = await reader.get("jobs/j/heat-map")
    length = int.from_bytes(answer.content[:4], "little")
    header = msgspec.json.decode(answer.content[4 : 4 + length])
    assert (header["ranks"], header["nodes"]) == ([0, 1], [["n1", 1], ["n2", 1]])
    assert header["found"] == [[1, "open"]]
    assert (await problem(reader, "jobs/j/heat-map", measure="waited"))[0] == 503
    straggler = Straggler()  # it has restarted, and knows the job by its document
    straggler.parts = {0: heat_map_part(0, (), [], windows=())}
    async with answering(api, straggler):
        assert (await reader.get("jobs/j/heat-map")).content == answer.content


async def test_while_straggler_is_away_one_line_says_so_and_the_record_still_answers(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    await api.add(*began(2), found(1))
    for path in ("jobs/j/stragglers/now", "jobs/j/timings", "jobs/j/heat-map"):
        status, code, detail = await problem(reader, path)
        assert (status, code) == (503, "straggler_unavailable")
        assert detail.startswith("straggler cannot be asked: ")
        assert "\n" not in detail
        assert (await problem(reader, path.replace("/j/", "/nobody/")))[0] == 404
    assert await ranks(reader) == [1]


async def test_a_job_that_straggler_has_not_heard_of_is_a_404_that_says_so(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    async def refuse(question: Message) -> Message:
        del question
        raise RefusalError("404", "no such job")

    await api.add(*began(2))
    async with api.bus.answer("straggler", {"scores": refuse}):
        status, _, detail = await problem(reader, "jobs/j/stragglers/now")
    assert (status, detail) == (
        404,
        "no timings of job j have arrived: it does not run, has sent none yet, or "
        "straggler.timings is off",
    )


async def test_a_role_that_no_rank_has_is_a_422_that_names_the_others(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    async def refuse(question: Message) -> Message:
        del question
        raise RefusalError("422", "no rank has the role 'nope': use one of stage 0, stage 1")

    await api.add(*began(2))
    async with api.bus.answer("straggler", {"scores": refuse}):
        assert await problem(reader, "jobs/j/stragglers/now", role="nope") == (
            422, "refused", "no rank has the role 'nope': use one of stage 0, stage 1",
        )  # fmt: skip


async def test_a_job_that_has_ended_says_so_and_where_its_slow_ranks_are(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    async def refuse(question: Message) -> Message:
        del question
        raise RefusalError("404", "no such job")

    ended = make("job_ended", job="j", state="stopped")
    await api.add(make("job_started", job="j", round=None), *began(2), ended)
    said = "job j has ended (stopped): everstep stragglers j --history shows its slow ranks"
    empty = RankScoreTable(round=0, window=0, ranks=(), said="this job has sent nothing")
    async with answering(api, Straggler(empty)):
        assert (await get(reader, "jobs/j/stragglers/now"))["note"] == said
    async with api.bus.answer("straggler", {"scores": refuse}):
        assert (await problem(reader, "jobs/j/stragglers/now"))[2] == said


async def test_a_list_that_the_client_has_is_not_sent_again(
    api: Api, reader: httpx2.AsyncClient
) -> None:
    await api.add(*began(2), found(1))
    tag = (await reader.get("jobs/j/stragglers")).headers["ETag"]
    again = await reader.get("jobs/j/stragglers", headers={"If-None-Match": tag})
    assert (again.status_code, again.content) == (304, b"")
