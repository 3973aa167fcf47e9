"""The groups of NVRx's replication, and a plan for what each rank must send."""

from typing import Any

import pytest

from trainer_sdk.nvrx.rank_groups import ExchangePlan, GroupWrapper, batched, parse_group_sequence
from trainer_sdk.nvrx.replication import CliqueReplicationStrategy, NoReplicasAvailableError


def test_groups_are_those_of_the_documentation() -> None:
    """NVRx's example: 32 ranks, 8 apart, two in a group."""
    groups = parse_group_sequence(8, 2, 32)
    assert groups[:8] == [(rank, rank + 8) for rank in range(8)]
    assert groups[8:] == [(rank, rank + 8) for rank in range(16, 24)]
    assert sorted(sum(parse_group_sequence(3, 2, 12), ())) == list(range(12))


@pytest.mark.parametrize(("jump", "factor", "size"), [(0, 2, 4), (1, 0, 4), (2, 2, 6)])
def test_a_number_of_ranks_that_does_not_fit_is_refused(jump: int, factor: int, size: int) -> None:
    with pytest.raises(ValueError, match=r"at least 1|a multiple of 4"):
        parse_group_sequence(jump, factor, size)


def test_batches() -> None:
    assert list(batched("abcde", 2)) == [("a", "b"), ("c", "d"), ("e",)]
    with pytest.raises(ValueError, match="at least 1"):
        list(batched("a", 0))


class Group(GroupWrapper):
    """Ranks that all want the same."""

    def __init__(self, wanted: dict[int, list[str]]) -> None:
        super().__init__()
        self._wanted = wanted

    @property
    def ranks(self) -> list[int]:
        return sorted(self._wanted)

    def all_gather_object(self, my_obj: Any) -> list[Any]:
        return [self._wanted[rank] for rank in self.ranks]


def planned(available: dict[int, list[str]], wanted: dict[int, list[str]]) -> ExchangePlan:
    return CliqueReplicationStrategy(Group(wanted)).retrieve_plan(available, wanted[0])


def test_who_has_a_state_keeps_it_and_senders_take_turns() -> None:
    available = {0: ["a", "b"], 1: ["a", "b"], 2: [], 3: []}
    plan = planned(available, {0: ["a"], 1: ["b"], 2: ["a"], 3: ["b"]})
    assert [(one.sender, one.receiver, one.id_) for one in plan.entries] == [
        (0, 0, "a"), (1, 1, "b"), (0, 2, "a"), (1, 3, "b"),
    ]  # fmt: skip
    assert plan.required_ids(1) == {"b"}
    assert plan.required_ids(3) == set()


def test_a_state_that_nobody_has_is_an_error() -> None:
    with pytest.raises(NoReplicasAvailableError, match="no rank of .* has a"):
        planned({0: [], 1: ["b"]}, {0: ["a"], 1: ["b"]})
