"""Which rank computes the step of which other one, and what travels to it."""

from collections import UserDict
from typing import Any

import pytest
import torch

from trainer_sdk.numerics.agreement import RankPlace, SentResult, bits, number
from trainer_sdk.numerics.elsewhere import StepPeers, _decoded, _encoded
from trainer_sdk.numerics.judgement import StepResult
from trainer_sdk.numerics.replay import NO_BATCH, StepCall
from trainer_sdk.numerics.snapshot import RandomStates, Snapshot, TrainingParts


def places(nodes: str, *groups: tuple[int, ...]) -> list[RankPlace]:
    of = {rank: group for group in groups for rank in group}
    return [RankPlace(node, "", of.get(rank, ())) for rank, node in enumerate(nodes)]


def computers(given: list[RankPlace]) -> list[int]:
    return [StepPeers(given, rank).computer for rank in range(len(given))]


def test_a_rank_of_another_node_computes_the_step() -> None:
    assert computers(places("aabb", (0, 1, 2, 3))) == [2, 3, 0, 1]
    assert computers(places("aaaa", (0, 1, 2, 3))) == [1, 2, 3, 0]
    assert computers(places("aabbcc", (0, 1, 2, 3, 4, 5))) == [2, 3, 4, 5, 0, 1]


def test_stages_of_a_replica_move_together() -> None:
    given = places("aabb", (0, 2), (1, 3))
    assert computers(given) == [2, 3, 0, 1]
    peers = StepPeers(given, 0)
    assert [peers.replica(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert StepPeers(places("ab", (0, 1)), 0).replica(0) is None


def test_each_rank_computes_for_another_one() -> None:
    given = places("abcabc", (0, 1, 2, 3, 4, 5))
    for rank in range(6):
        assert StepPeers(given, StepPeers(given, rank).computer).source == rank


@pytest.mark.parametrize("given", [places("ab"), places("ab", (0,), (1,)), places("abc", (0, 1))])
def test_without_peers_nobody_computes_it(given: list[RankPlace]) -> None:
    assert StepPeers(given, 0).shift == 0


def sent(batch: Any) -> bytes:
    call = StepCall(lambda one: one, batch, RandomStates())
    return _encoded([call], Snapshot(TrainingParts({}), []))


def test_a_batch_arrives_as_it_was() -> None:
    batch = {"ids": torch.arange(4), "more": [(torch.ones(2), "text", None), 3], "flag": True}
    ((received, states),), _ = _decoded(sent(batch), dict)
    assert received["ids"].tolist() == [0, 1, 2, 3]
    assert received["more"][0][1:] == ("text", None)
    assert torch.equal(states.torch, torch.get_rng_state())


def test_a_mapping_keeps_its_class() -> None:
    ((received, _),), _ = _decoded(sent(UserDict({"ids": torch.ones(1)})), UserDict)
    assert isinstance(received, UserDict)


@pytest.mark.parametrize("batch", [NO_BATCH, object(), [lambda: 1], {"a": {1, 2}}])
def test_what_cannot_travel_does_not(batch: Any) -> None:
    assert sent(batch) == b""


def test_results_travel_bit_for_bit() -> None:
    result = StepResult(float("nan"), -0.0, (1, 1 << 62))
    read = SentResult.of(result).read()
    assert repr(read) == repr(result)
    assert bits(number(bits(1e-300))) == bits(1e-300)
