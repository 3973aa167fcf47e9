"""What straggler may be asked, and what it answers."""

from everstep.messages.base import Int, Part, Question, Reply
from everstep.messages.stragglers import Score


class RankScores(Part, frozen=True, kw_only=True):
    """How one rank compares."""

    rank: Int
    """The rank."""
    node: str
    """Its node."""
    role: str = ""
    """Its role group."""
    scores: tuple[Score, ...] = ()
    """Each signal."""
    is_straggler: bool = False
    """It is one by the rules in force."""


class ShowScores(Question, frozen=True, kw_only=True, tag="show_scores.v1"):
    """How do the ranks compare? Anyone asks straggler."""

    most: Int = 100
    """The slowest so many."""
    role: str = ""
    """Only this role group; empty for all."""


class RankScoreTable(Reply, frozen=True, kw_only=True, tag="rank_score_table.v1"):
    """How the ranks of a job compare, in its newest window."""

    round: Int
    """The round."""
    window: Int
    """The window."""
    ranks: tuple[RankScores, ...]
    """The slowest first."""
    ranks_seen: Int = 0
    """How many ranks were compared."""
    slowdown_ratio: float | None = None
    """How much faster the job would be without its stragglers: 0.12 for 12 %."""
