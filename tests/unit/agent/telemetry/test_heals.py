"""What ranks report of their states in a round into which some have gone on with theirs."""

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from everstep.messages import Fact, StateHealed, decode, encode
from everstep.messages.facts.ranks import ranks_in_words
from everstep_services.agent.ranks.protocol import RankRuns, RankSaid
from everstep_services.agent.replicas.node_checkpoints import NodeCheckpoints
from everstep_services.agent.runtime.rank_events import RankEvents
from everstep_services.agent.telemetry.facts import AgentFacts
from everstep_services.agent.telemetry.progress import ProgressReader
from tests.fakes.clock import FakeClock
from tests.unit.agent.orders import start
from trainer_sdk.wire import Datagram, RankHealed

KEPT = {"origin": "own", "step": 41, "took_s": 0.25, "kept": 7, "replaced": 1,
        "replaced_ranks": [5]}  # fmt: skip
ONE = "rank 5 was replaced"


class Node:
    """The parts of an agent that hear of states."""

    def __init__(self) -> None:
        clock = FakeClock()
        self.facts: list[Fact] = []
        self.lines: list[str] = []
        self.records = AgentFacts("j", "n", clock)
        self.checkpoints = NodeCheckpoints(self.records, clock, self.facts.append)
        self.order = replace(start(), round=2, slot=0, first_rank=0, ranks=8)
        progress = SimpleNamespace(went_back=lambda _: None)
        observers = SimpleNamespace(
            records=self.records, checkpoints=self.checkpoints, record=self.facts.append,
            progress=progress,
        )  # fmt: skip
        place = SimpleNamespace(
            leaves_children=False, say=lambda text, **_: self.lines.append(text)
        )
        none = cast("Any", None)
        self.events = RankEvents(
            none, cast("Any", place), clock, none, none, cast("Any", observers)
        )
        self.checkpoints.begins(self.order)

    def says(self, rank: int, body: dict[str, Any]) -> StateHealed:
        line = {"type": "healed", "round": 2, "rank": rank, **body}
        message = msgspec.json.decode(msgspec.json.encode(line), type=Datagram)
        assert isinstance(message, RankHealed)
        self.events._said(self.order, RankSaid(2, rank, message))
        fact = decode(encode(self.facts[-1]))
        assert isinstance(fact, StateHealed)
        return fact


def test_what_rank_0_tells_of_all_is_recorded_shown_and_reported() -> None:
    node = Node()
    node.checkpoints.restore_s = 0.2
    fact = node.says(0, KEPT)
    assert (fact.round, fact.rank, fact.node, fact.kept, fact.step) == (2, 0, "n", 7, 41)
    told = f"{ONE}, 7 kept their state"
    assert (fact.sentence, node.lines) == (told, [told])
    reported = node.checkpoints
    assert (reported.heal_s, reported.healed) == (0.25, told)
    assert reported.restore_s == 0.0, "a restore from an image is part of that time"
    reported.begins(node.order)
    assert (reported.heal_s, reported.healed) == (0.0, "")


def test_a_rank_whose_state_came_from_elsewhere_is_recorded_alone() -> None:
    node = Node()
    body = {"origin": "rank", "donor": 4, "step": 41, "size_bytes": 1 << 30, "took_s": 0.2}
    fact = node.says(5, body)
    assert (fact.rank, fact.local_rank, fact.donor, fact.size_bytes) == (5, 5, 4, 1 << 30)
    assert (node.lines, node.checkpoints.heal_s) == ([], 0.0)


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"replaced_ranks": [4, 5], "replaced": 2, "kept": 6},
         "ranks 4 and 5 were replaced, 6 kept their state"),
        ({"kept": 1}, f"{ONE}, 1 kept its state"),
        ({"kept": 6, "taken": 1}, f"{ONE}, 6 kept their state, 1 took it from others"),
        ({"replaced": 0, "replaced_ranks": [], "kept": 8}, "8 kept their state"),
        ({"origin": "image", "step": 37, "kept": 0, "taken": 7},
         f"{ONE}, all went back to step 37"),
        ({"origin": "fresh", "step": None, "kept": 0}, f"{ONE}, all began anew"),
    ],
)  # fmt: skip
def test_the_sentence_about_all_ranks(body: dict[str, Any], sentence: str) -> None:
    assert Node().says(0, KEPT | body).sentence == sentence


@pytest.mark.parametrize(
    ("ranks", "count", "words"),
    [
        ([5], 1, "rank 5"),
        ([3, 5, 9], 3, "ranks 3, 5 and 9"),
        ([8, 9, 10, 11], 4, "ranks 8 to 11"),
        (range(8, 80), 72, "ranks 8 to 79"),
        (range(0, 40, 2), 20, "20 ranks"),
        (range(100), 4096, "4096 ranks"),
        ([], 3, "3 ranks"),
    ],
)
def test_ranks_in_words(ranks: list[int], count: int, words: str) -> None:
    assert ranks_in_words(ranks, count) == words


@pytest.mark.parametrize(
    ("anew", "told"),
    [
        ({5: "warm"}, "round 2: 7 ranks go on, rank 5 starts anew"),
        ({6: "cold", 7: "warm"}, "round 2: 6 ranks go on, ranks 6 and 7 start anew"),
        ({}, "round 2: 8 ranks go on"),
        (dict.fromkeys(range(1, 8), "warm"), "round 2: 1 rank goes on, ranks 1 to 7 start anew"),
        (dict.fromkeys(range(8), "warm"), ""),
    ],
)
def test_the_console_tells_which_ranks_go_on_once_all_run(anew: dict[int, str], told: str) -> None:
    none = cast("Any", None)
    source = cast("Any", SimpleNamespace(step=None, pids=None))
    progress = ProgressReader(none, none, source, none, FakeClock(), none)
    progress.begins(replace(start(), round=2, ranks=8))
    lines = [
        progress.runs(RankRuns(2, rank, 9, cast("Any", anew.get(rank, "kept")), 0.1))
        for rank in range(8)
    ]
    assert lines == [*[""] * 7, told]
    assert progress.warm_ranks == sum(how == "warm" for how in anew.values())
