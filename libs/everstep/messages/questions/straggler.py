"""Questions to straggler, and their replies."""

from everstep.messages.base import Count, Int, Name, Part, Question, Reply
from everstep.messages.facts.stragglers import Score


class RankScores(Part, frozen=True, kw_only=True):
    """How one rank compares."""

    rank: Count
    """The rank."""
    node: Name
    """Its node."""
    role: str = ""
    """Its role group."""
    scores: tuple[Score, ...] = ()
    """Each signal."""
    is_straggler: bool = False
    """It is one by the rules in force."""
    own_s: float | None = None
    """Its own time in a step."""
    slower_ratio: float | None = None
    """How much longer that is than the median of its role group: 0.1 for 10 %."""
    lateness_s: float | None = None
    """By how much it enters collectives later than the median of the others: the median of the
    operation where it is the latest."""
    waited_s: float | None = None
    """How long it waits for others in a step."""


class GroupScores(Part, frozen=True, kw_only=True):
    """Who waits for whom in one process group."""

    group: str
    """The process group."""
    ranks: Count
    """How many of its ranks were compared."""
    last_rank: Count | None = None
    """The rank that was the last to enter most often."""
    last_ratio: float = 0.0
    """In this share of its collectives."""
    waited_s: float = 0.0
    """What the others wait for the last one in a step, in the median."""


class ShowScores(Question, frozen=True, kw_only=True, tag="show_scores.v1"):
    """How do the ranks compare? Anyone asks straggler."""

    most: Int = 100
    """How many of the slowest ranks."""
    role: str = ""
    """Only this role group; empty for all."""


class RankScoreTable(Reply, frozen=True, kw_only=True, tag="rank_score_table.v1"):
    """How the ranks of a job compare, in its newest window."""

    round: Count
    """The round."""
    window: Int
    """The last step of the window; 0 while none was compared."""
    ranks: tuple[RankScores, ...]
    """The slowest first."""
    ranks_seen: Int = 0
    """How many ranks were compared."""
    slowdown_ratio: float | None = None
    """How much faster the job would be without its stragglers: 0.12 for 12 %."""
    groups: tuple[GroupScores, ...] = ()
    """The process groups in which ranks wait the longest, at most 100."""
    step_s: float | None = None
    """How long a step takes."""
    clock_error_s: float | None = None
    """Clocks of nodes are aligned to within this."""
    window_steps: Int = 0
    """Steps of a window."""
    is_on: bool = True
    """Timings are switched on."""
    ranks_missing: Int = 0
    """Ranks of the round that sent nothing in the window."""
    said: str = ""
    """Why nothing, or not everything, is known."""
    is_by_time: bool = False
    """Nobody counts steps: a step is a second since 1970."""


class ShowTimings(Question, frozen=True, kw_only=True, tag="show_timings.v1"):
    """Where did the time go, rank by rank and window by window? Anyone asks straggler."""

    measure: Name = "own"
    """`own`, `ratio`, `waited`, `step`, `cpu`, `runnable`, `round_trip`, or `section`."""
    section: str = ""
    """Which section, if `section`."""
    first_rank: Int = 0
    """The first rank to show."""
    most_ranks: Int = 512
    """The most ranks to show."""
    most_windows: Int = 60
    """The most windows to show, the latest."""


class TimingRow(Part, frozen=True, kw_only=True, array_like=True):
    """One rank of such a table."""

    rank: Count
    """The rank."""
    node: Name
    """Its node."""
    role: str
    """Its role group."""
    values: tuple[float | None, ...]
    """One for each window, the oldest first; None where nothing is known."""


class TimingTable(Reply, frozen=True, kw_only=True, tag="timing_table.v1"):
    """Ranks by windows: a gap is a gap."""

    round: Count
    """The round."""
    measure: Name
    """What the values are."""
    windows: tuple[tuple[Int, Int], ...]
    """The first and the last step of each window, the oldest first."""
    rows: tuple[TimingRow, ...]
    """By rank."""
    next_rank: Int | None = None
    """The first rank that did not fit, if any."""
    sections: tuple[str, ...] = ()
    """The sections that can be asked for."""
    is_by_time: bool = False
    """Nobody counts steps: a step is a second since 1970."""


class ShowHeatMap(Question, frozen=True, kw_only=True, tag="show_heat_map.v1"):
    """The same as a picture of many ranks? Anyone asks straggler."""

    measure: Name = "own"
    """`own`, `ratio`, `waited`, `step`, `cpu`, `runnable`, `round_trip`, or `section`."""
    section: str = ""
    """Which section, if `section`."""
    first_rank: Int = 0
    """The first rank to show."""
    most_windows: Int = 100
    """The most windows to show, the latest."""


class NodeRun(Part, frozen=True, kw_only=True, array_like=True):
    """Adjacent ranks of one node."""

    node: Name
    """The node."""
    ranks: Count
    """How many ranks."""


class HeatMapPart(Reply, frozen=True, kw_only=True, tag="heat_map_part.v1"):
    """Ranks by windows, two bytes a cell: as many ranks as fit into a message."""

    round: Count
    """The round."""
    measure: Name
    """What the values are."""
    windows: tuple[tuple[Int, Int], ...]
    """The first and the last step of each window, the oldest first."""
    first_rank: Int
    """The first rank that is shown; the others follow without a gap."""
    nodes: tuple[NodeRun, ...]
    """The nodes of the ranks, in this order."""
    low: float
    """The value of a cell of 1."""
    high: float
    """The value of a cell of 65 535."""
    cells: str
    """A cell for each rank and window, rank by rank: two bytes, little-endian, in base64. 0 is
    not known."""
    next_rank: Int | None = None
    """The first rank that did not fit, if any."""
    sections: tuple[str, ...] = ()
    """The sections that can be asked for."""
    is_by_time: bool = False
    """Nobody counts steps: a step is a second since 1970."""


class ShowSwitches(Question, frozen=True, kw_only=True, tag="show_switches.v1"):
    """Which switches hold for slow ranks? Anyone asks straggler.

    About a job, or about all that have none of their own: `everstep.subjects.CLUSTER`.
    """


class SwitchInForce(Part, frozen=True, kw_only=True):
    """What holds of one switch."""

    name: Name
    """Its dotted name: `straggler.window_s`."""
    value: str
    """As an operator would write it."""
    source: str
    """Where it is from: `default`, `settings`, `control`, `control of the job`, or `brake`."""


class SwitchTable(Reply, frozen=True, kw_only=True, tag="switch_table.v1"):
    """All switches of slow ranks."""

    switches: tuple[SwitchInForce, ...]
    """By name."""


class ReadClock(Question, frozen=True, kw_only=True, tag="read_clock.v1"):
    """What time is it? Agents ask straggler, to learn how far their clock is ahead."""


class ClockReading(Reply, frozen=True, kw_only=True, tag="clock_reading.v1"):
    """The time of the replica that answers."""

    clock: Name
    """The replica."""
    at_s: float
    """Seconds since 1970, by its clock."""
