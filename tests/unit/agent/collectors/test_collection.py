"""What is collected from ranks before they are stopped: of real processes and real pages."""

import asyncio
import json
import os
import subprocess
import sys
import time
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from struct import pack
from typing import Any

import pytest

from everstep.clock import Clock, SystemClock
from everstep.evidence.archive import ArchiveMember
from everstep.messages import EvidenceCollected
from everstep_services.agent.collectors.collection import (
    Collector,
    EvidenceFound,
    Piece,
    RankPiece,
    Scene,
    collect,
    from_each,
)
from everstep_services.agent.collectors.rank_state import pages, processes
from everstep_services.agent.collectors.registry import collectors
from everstep_services.agent.ranks.protocol import RankSeen
from everstep_services.agent.settings import KINDS
from tests.waiting import until
from trainer_sdk import layout
from trainer_sdk.page import make_page

CLOCK = SystemClock()


class Ranks:
    """Pages that a test fills in."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def seen(self, rank: int, pid: int = 0, words: Mapping[int, int] | None = None) -> RankSeen:
        """A rank whose page says this; without words it has not opened its page yet."""
        path = self._folder / f"page-{rank}"
        page = make_page(str(path))
        if words is not None:
            filled = array("q", path.read_bytes())
            opened = {layout.MAGIC_AT: layout.MAGIC, layout.PHASE: layout.PHASE_STARTING}
            for place, word in {**opened, **words}.items():
                filled[place] = word
            with path.open("r+b") as file:
                file.write(filled.tobytes())
        return RankSeen(rank, pid, page, self._folder)


@pytest.fixture
def ranks(tmp_path: Path) -> Ranks:
    return Ranks(tmp_path)


@pytest.fixture
def sleeper() -> Iterator[int]:
    command = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.communicate()


def content(found: EvidenceFound | None) -> dict[str, Any]:
    assert found is not None
    decoded: dict[str, Any] = json.loads(found.content)
    return decoded


def test_the_kernel_is_asked_about_ranks_that_still_live(ranks: Ranks, sleeper: int) -> None:
    stat = Path(f"/proc/{sleeper}/stat")
    until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S", "it sleeps")
    seen = [ranks.seen(2, sleeper), ranks.seen(3), ranks.seen(4, _gone())]
    found = asyncio.run(processes(Scene(seen, 1.0), CLOCK))
    known = content(found)["ranks"]
    assert list(known) == ["2"]
    assert known["2"]["pid"] == str(sleeper)
    assert known["2"]["stat"].startswith(f"{sleeper} ")
    assert "State:" in known["2"]["status"]
    assert found is not None
    assert found.summary.startswith("rank 2: S (sleeping)")
    assert "1 threads" in found.summary


def test_nothing_is_said_of_ranks_that_are_all_gone(ranks: Ranks) -> None:
    assert (
        asyncio.run(processes(Scene([ranks.seen(0), ranks.seen(1, _gone())], 1.0), CLOCK)) is None
    )


def test_pages_tell_how_far_each_rank_was_also_of_those_that_are_gone(ranks: Ranks) -> None:
    ago = int((CLOCK.now() - 5) * 1e9)
    stepped = {layout.STEP: 41, layout.PROGRESS_NS: ago, layout.PHASE: layout.PHASE_SCRIPT}
    seen = [ranks.seen(0, words=stepped), ranks.seen(1, words={}), ranks.seen(2)]
    found = asyncio.run(pages(Scene(seen, 1.0), CLOCK))
    assert set(content(found)["ranks"]) == {"0", "1"}
    assert content(found)["ranks"]["0"]["page"]["step"] == 41
    assert found is not None
    first, second = found.summary.split("; ")
    assert first.startswith("rank 0: script, step 41, last moved ")
    assert second == "rank 1: starting, no step yet"


def in_section(number: int) -> dict[int, int]:
    """One thread, in this section of the three that there are."""
    entered = number * layout.FRAME_STEP + CLOCK.now() - 5
    name = int.from_bytes(b"forward", "little")
    return {
        layout.SECTIONS: 3,
        layout.NAMES_AT + 2 * layout.NAME_WORDS: name,
        layout.LANES_AT + layout.LANE_THREAD: 77,
        layout.LANES_AT + layout.LANE_FRAMES: int.from_bytes(pack("<d", entered), "little"),
    }


def test_pages_name_the_section_that_a_rank_is_in(ranks: Ranks) -> None:
    found = asyncio.run(pages(Scene([ranks.seen(0, words=in_section(2))], 1.0), CLOCK))
    assert found is not None
    assert found.summary.endswith(" s in forward")
    assert content(found)["ranks"]["0"]["sections"] == {"2": "forward"}


def test_a_page_that_holds_nonsense_is_evidence_too(ranks: Ranks) -> None:
    found = asyncio.run(pages(Scene([ranks.seen(0, words=in_section(9))], 1.0), CLOCK))
    assert "section 9" in content(found)["ranks"]["0"]["damaged"]
    assert found is not None
    assert found.summary == "rank 0: starting, no step yet"


def test_a_page_that_nothing_can_be_read_from_says_so(ranks: Ranks) -> None:
    found = asyncio.run(pages(Scene([ranks.seen(0, words={layout.PHASE: 99})], 1.0), CLOCK))
    assert found is not None
    assert found.summary.startswith("rank 0: its page is damaged: ")


def test_of_many_ranks_a_few_are_named(ranks: Ranks) -> None:
    found = asyncio.run(
        pages(Scene([ranks.seen(rank, words={}) for rank in range(20)], 1.0), CLOCK)
    )
    assert found is not None
    assert found.summary.endswith("rank 7: starting, no step yet; and 12 more")


async def _never(scene: Scene, clock: Clock) -> EvidenceFound | None:
    await asyncio.Event().wait()
    return None


async def _breaks(scene: Scene, clock: Clock) -> EvidenceFound | None:
    raise ValueError("no")


async def _nothing(scene: Scene, clock: Clock) -> EvidenceFound | None:
    return None


async def _good(scene: Scene, clock: Clock) -> EvidenceFound | None:
    return EvidenceFound("all is well", b"x")


def test_a_collector_that_is_late_or_breaks_takes_nothing_from_the_others() -> None:
    table: dict[str, Collector] = {"a": _never, "b": _breaks, "c": _nothing, "d": _good}
    late, broken, good = asyncio.run(collect(table, Scene((), 0.01), CLOCK))
    assert late == Piece("a", missing="not there after 0.01 s", took_s=0.01)
    assert (broken.evidence, broken.missing) == ("b", "ValueError: no")
    assert (good.evidence, good.content) == ("d", EvidenceFound("all is well", b"x"))


def test_a_processor_that_is_busy_beyond_the_limit_loses_only_what_was_late(ranks: Ranks) -> None:
    limit_s = 0.01

    async def each(scene: Scene, clock: Clock) -> EvidenceFound:
        async def answer(rank: RankSeen) -> RankPiece:
            if rank.rank:
                time.sleep(2 * limit_s)  # noqa: ASYNC251 - the limits of a rank and of all pass
                await asyncio.Event().wait()
            return RankPiece("there", ArchiveMember(rank.rank, "json", b"{}"))

        return await from_each(scene, answer)

    scene = Scene([ranks.seen(rank, os.getpid()) for rank in (0, 1)], limit_s)
    (piece,) = asyncio.run(collect({"flight_recorder": each}, scene, CLOCK))
    assert piece.ranks == {0}
    assert piece.content is not None
    assert list(piece.content.missing) == [1]


def test_what_is_collected_has_names_that_the_messages_know() -> None:
    """Each kind is collected, may be turned off, and is in the message's own words."""
    table = collectors()
    assert {*table.of_living, *table.of_ended} == set(KINDS)
    assert "stacks" not in collectors(("stacks",)).of_ranks
    said = Path(sys.modules[EvidenceCollected.__module__].__file__ or "").read_text()
    assert all(f"`{kind}`" in said for kind in KINDS)


def _gone() -> int:
    """The number of a process that was."""
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert not os.path.exists(f"/proc/{process.pid}")
    return process.pid
