"""What straggler may be asked, and what it answers."""

from everstep.messages.base import Count, Int, Name, Part, Question, Reply
from everstep.messages.stragglers import Score


class RankScores(Part, frozen=True, kw_only=True):
    """How one rank compares."""

    rank: Count
    """The rank."""
    node: Name
    """Its node."""
    role: Name = ""
    """Its role group."""
    scores: tuple[Score, ...] = ()
    """Each signal."""
    is_straggler: bool = False
    """It is one by the rules in force."""


class ShowScores(Question, frozen=True, kw_only=True, tag="show_scores.v1"):
    """How do the ranks compare? Anyone asks straggler."""

    most: Int = 100
    """The slowest so many."""
    role: Name = ""
    """Only this role group; empty for all."""


class RankScoreTable(Reply, frozen=True, kw_only=True, tag="rank_score_table.v1"):
    """How the ranks of a job compare, in its newest window."""

    round: Count
    """The round."""
    window: Int
    """The window."""
    ranks: tuple[RankScores, ...]
    """The slowest first."""
    ranks_seen: Int = 0
    """How many ranks were compared."""
    slowdown_ratio: float | None = None
    """How much faster the job would be without its stragglers: 0.12 for 12 %."""
