"""What agents said last: the newest round, how old it is, and that it never grows for ever."""

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from msgspec.structs import replace

from everstep.messages import NodeBeat, ProbeBeat, RankBeat, SectionLimit
from everstep_services.history.beats import STALE_S, Beats
from tests.fakes.bus import MemoryBus, MemoryServer
from tests.fakes.clock import FakeClock


def beat(node: str, *ranks: int, round_: int | None = 1, job: str = "j", **more: str) -> NodeBeat:
    return NodeBeat(
        job=job,
        node=node,
        sequence=1,
        at=datetime(2026, 1, 1, tzinfo=UTC),
        state=more.get("state", "running"),
        round=round_,
        slot=0 if ranks else None,
        ranks=tuple(RankBeat(rank=rank, section=more.get("section")) for rank in ranks),
    )


def made() -> tuple[Beats, FakeClock]:
    clock = FakeClock()
    return Beats(MemoryBus(MemoryServer()), clock), clock


async def test_a_node_that_falls_silent_is_shown_as_it_was_and_how_long_ago() -> None:
    beats, clock = made()
    beats.hear(beat("n1", 0, 1, section="data"))
    beats.hear(beat("n2", 2, 3))
    await clock.advance(STALE_S)
    beats.hear(beat("n2", 2, 3))
    view = beats.view("j")
    assert [(one.beat.node, one.age_s, one.is_stale) for one in view.nodes] == [
        ("n1", STALE_S, True),
        ("n2", 0.0, False),
    ]
    rank, heard = view.ranks[1]
    assert (sorted(view.ranks), rank.section, heard.beat.node) == ([0, 1, 2, 3], "data", "n1")


async def test_limits_are_those_that_an_agent_has_told_lately() -> None:
    beats, clock = made()
    assert beats.limits("j") == ()
    limits = (SectionLimit(section="data", limit_s=3.0, source="configured", origin="--limit"),)
    beats.hear(replace(beat("n1", 0), limits=limits))
    beats.hear(beat("n1", 0))
    beats.hear(beat("n2", 1))
    assert beats.limits("j") == limits
    assert beats.limits("other") == ()
    await clock.advance(31)
    assert beats.limits("j") == ()
    beats.hear(replace(beat("n1", 0), limits=limits))
    for node in ("n1", "n2"):
        beats.hear(beat(node, state="leaving"))
    assert beats.limits("j") == ()


async def test_only_ranks_of_the_newest_round_are_shown() -> None:
    beats, clock = made()
    beats.hear(beat("lost", 0, 1, round_=4))
    beats.hear(beat("n2", 2, 3, round_=4))
    await clock.advance(STALE_S)
    beats.hear(beat("n2", 2, 3, round_=5))
    beats.hear(beat("n3", 0, 1, round_=5))
    view = beats.view("j")
    assert view.round == 5
    assert {rank: heard.beat.node for rank, (_, heard) in view.ranks.items()} == {
        0: "n3",
        1: "n3",
        2: "n2",
        3: "n2",
    }


async def test_rounds_that_begin_anew_are_the_newest_once_the_others_are_silent() -> None:
    beats, clock = made()
    beats.hear(beat("n1", 0, round_=9))
    await clock.advance(STALE_S)
    beats.hear(beat("n2", 0, round_=1))
    assert beats.view("j").round == 1


async def test_who_leaves_or_is_long_silent_is_forgotten() -> None:
    beats, clock = made()
    beats.hear(beat("n1", 0))
    beats.hear(beat("n2", 1))
    beats.hear(beat("n1", state="leaving"))
    assert [one.beat.node for one in beats.view("j").nodes] == ["n2"]
    await clock.advance(901)
    assert beats.view("j").nodes == []
    beats.hear(beat("n3", 0, job="other"))
    assert beats.statistics()["nodes"] == 1.0


async def test_a_node_is_as_the_job_that_heard_of_it_last() -> None:
    beats, clock = made()
    beats.hear(beat("n1", 0, job="before"))
    await clock.advance(5)
    beats.hear(beat("n1", 0, job="now"))
    found = beats.node("n1")
    assert found is not None
    assert (found.beat.job, found.age_s) == ("now", 0.0)
    assert beats.node("n2") is None


def test_probes_are_those_of_the_last_beat_that_told_them() -> None:
    """Not every beat has them; an agent that starts anew tells its own."""
    beats, _ = made()
    probes = (ProbeBeat(check="nic", every_s=10.0, policy="exclude", failures=2),)
    beats.hear(replace(beat("n1"), sequence=10, probes=probes))
    beats.hear(replace(beat("n1"), sequence=11))
    heard = beats.node("n1")
    assert heard is not None
    assert heard.probes == probes
    beats.hear(replace(beat("n1"), sequence=1))
    heard = beats.node("n1")
    assert heard is not None
    assert heard.probes == ()
    beats.hear(replace(beat("n1"), sequence=2, probes=probes))
    beats.hear(beat("n1", state="leaving"))
    assert beats.node("n1") is None


class Sender:
    """An agent that sends a beat each second, and the network to history."""

    def __init__(self, offset_s: float = 0.0, job: str = "j", node: str = "n1") -> None:
        self.beats, self.clock = made()
        self.offset_s = offset_s
        self._sequence = 0
        self._job, self._node = job, node

    def sent(self) -> NodeBeat:
        self._sequence += 1
        at = self.clock.wall() + timedelta(seconds=self.offset_s)
        return replace(beat(self._node, job=self._job), at=at, sequence=self._sequence)

    async def beat(self, seconds: int, delays_s: Sequence[float] = (0.0,)) -> None:
        """Send for some seconds; the beats come after these delays, in turn."""
        for number in range(seconds):
            late = self.sent()
            delay_s = delays_s[number % len(delays_s)]
            self.beats.hear(replace(late, at=late.at - timedelta(seconds=delay_s)))
            await self.clock.advance(1)

    @property
    def wrong(self) -> dict[str, float]:
        return {node: round(offset_s, 3) for node, offset_s in self.beats.wrong_clocks().items()}


@pytest.mark.parametrize("offset_s", [12.0, -12.0, 3600.0])
async def test_a_wrong_clock_is_named_with_its_offset(offset_s: float) -> None:
    """Ahead or behind, whatever the network does to single beats."""
    sender = Sender(offset_s)
    await sender.beat(30, delays_s=(4.0, 0.02, 90.0))
    assert sender.wrong == {}, "not known yet"
    await sender.beat(30, delays_s=(4.0, 0.02, 90.0))
    assert sender.wrong == {"n1": offset_s - 0.02}
    heard = sender.beats.node("n1")
    assert heard is not None
    assert heard.clock_offset_s == pytest.approx(offset_s - 0.02)
    assert sender.beats.is_wrong(heard.clock_offset_s)
    counts = sender.beats.statistics()
    assert counts["wrong_clocks"] == 1.0
    assert counts["clock_offset_most_seconds"] == pytest.approx(abs(offset_s - 0.02))
    await sender.clock.advance(STALE_S)
    assert sender.wrong == {}, "a node that is not heard"


async def test_beats_that_have_waited_are_no_wrong_clock() -> None:
    """The bus is away for some minutes; then all come at once."""
    sender = Sender(offset_s=0.5)
    await sender.beat(40)
    waiting = []
    for _ in range(200):
        waiting.append(sender.sent())
        await sender.clock.advance(1)
    for late in waiting:
        sender.beats.hear(late)
        assert sender.wrong == {}
    await sender.beat(80, delays_s=(4.9,))
    assert sender.wrong == {}


async def test_a_clock_that_was_set_right_is_right() -> None:
    sender = Sender(-20.0)
    await sender.beat(40)
    assert sender.wrong == {"n1": -20.0}
    sender.offset_s = 0.0
    await sender.beat(1)
    assert sender.wrong == {}
    sender.offset_s = 20.0
    await sender.beat(1)
    assert sender.wrong == {"n1": 20.0}
    sender.offset_s = 0.0
    await sender.beat(61)
    assert sender.wrong == {}
    sender.beats.hear(beat("n1", state="leaving"))
    assert sender.beats.statistics()["clock_offset_most_seconds"] == 0.0
