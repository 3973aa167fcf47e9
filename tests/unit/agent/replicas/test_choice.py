"""Which step of its slot a node fetches."""

from everstep_services.agent.replicas.choice import Age, Offered, choices, newest_of_all


def offered(rank: int, *steps: int, round: int = 1, part: int = 0, needed: int = 1) -> list[
    Offered[str]
]:  # fmt: skip
    return [Offered((round, 0, step), rank, "node", part, needed) for step in steps]


def steps(ranks: range, here: dict[int, set[Age]], offers: list[Offered[str]]) -> list[
    int
]:  # fmt: skip
    return [choice.age[-1] for choice in choices(ranks, here, offers)]


def test_the_newest_that_every_rank_can_have_comes_first() -> None:
    offers = [*offered(0, 10, 20, 30), *offered(1, 10, 20)]
    assert steps(range(2), {}, offers) == [20, 10]


def test_what_is_here_is_not_fetched_and_counts_for_its_rank() -> None:
    here = {0: {(1, 0, 20)}, 1: {(1, 0, 10)}}
    found = choices(range(2), here, offered(1, 20))
    assert [(choice.age, list(choice.from_others)) for choice in found] == [((1, 0, 20), [1])]


def test_nothing_is_fetched_that_is_older_than_what_all_ranks_have() -> None:
    here = {0: {(1, 0, 10), (1, 0, 20)}, 1: {(1, 0, 20)}}
    assert newest_of_all(range(2), here) == (1, 0, 20)
    assert steps(range(2), here, [*offered(0, 10, 20), *offered(1, 10, 20)]) == []


def test_a_later_round_is_newer_than_a_higher_step() -> None:
    offers = [*offered(0, 30), *offered(0, 20, round=2)]
    assert steps(range(1), {}, offers) == [20, 30]


def test_parts_count_when_there_are_as_many_different_ones_as_are_needed() -> None:
    two = [*offered(0, 10, part=0, needed=2), *offered(0, 10, part=0, needed=2)]
    assert steps(range(1), {}, two) == []
    assert steps(range(1), {}, [*two, *offered(0, 10, part=4, needed=2)]) == [10]
