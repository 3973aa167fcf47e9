"""Questions to straggler, and their replies."""

from everstep.messages.base import Count, Int, Name, Part, Question, Reply
from everstep.messages.facts.stragglers import Score


class RankScores(Part, frozen=True, kw_only=True):
    """How one rank compares with the others."""

    rank: Count
    """The rank."""
    node: Name
    """The node of the rank."""
    role: str = ""
    """The role group of the rank."""
    scores: tuple[Score, ...] = ()
    """The score of each signal."""
    is_straggler: bool = False
    """The rank is a straggler by the rules that hold."""
    own_s: float | None = None
    """The rank's own time in a step."""
    slower_ratio: float | None = None
    """How much longer this own time is than the median of the role group: 0.1 for 10 %."""
    lateness_s: float | None = None
    """How much later than the median of the others the rank enters collectives: the median of the
    operation for which it is the latest."""
    waited_s: float | None = None
    """How long the rank waits for others in a step."""


class GroupScores(Part, frozen=True, kw_only=True):
    """Which rank of a process group the others wait for."""

    group: str
    """The process group."""
    ranks: Count
    """How many ranks of the group were compared."""
    last_rank: Count | None = None
    """The rank that most often entered last."""
    last_ratio: float = 0.0
    """The share of the group's collectives which that rank entered last."""
    waited_s: float = 0.0
    """How long the others wait for the last rank in a step, median."""


class RankSpread(Part, frozen=True, kw_only=True):
    """One figure over all ranks that have it."""

    name: Name
    """`own_s`, `section/forward_s`, or a score, with 1 for the best: `score/own`, `score/gpu`,
    `score/section/forward`."""
    values: tuple[float, ...]
    """The smallest, the median and the largest value of a rank."""


class ShowScores(Question, frozen=True, kw_only=True, tag="show_scores.v1"):
    """How do the ranks compare? Anyone asks straggler; an agent does for a script's tracker."""

    most: Int = 100
    """The number of ranks to show, the slowest first."""
    role: str = ""
    """Only this role group; empty for all."""


class RankScoreTable(Reply, frozen=True, kw_only=True, tag="rank_score_table.v1"):
    """How the ranks of a job compare, in its newest window."""

    round: Count
    """The round."""
    window: Int
    """The last step of the window; 0 while no window was compared."""
    ranks: tuple[RankScores, ...]
    """The ranks, the slowest first."""
    ranks_seen: Int = 0
    """How many ranks were compared."""
    slowdown_ratio: float | None = None
    """How much faster the job would be without its stragglers: 0.12 for 12 %."""
    groups: tuple[GroupScores, ...] = ()
    """The process groups in which ranks wait the longest, at most 100."""
    step_s: float | None = None
    """How long a step takes."""
    clock_error_s: float | None = None
    """The largest error of the alignment between the nodes' clocks."""
    window_steps: Int = 0
    """The number of steps of a window."""
    is_on: bool = True
    """Timings are switched on."""
    ranks_missing: Int = 0
    """Ranks of the round that sent nothing in the window."""
    said: str = ""
    """Why nothing is known, or less than usual."""
    is_by_time: bool = False
    """No SDK counts steps: a step is a second since 1970."""
    spreads: tuple[RankSpread, ...] = ()
    """The times and scores of all ranks that were compared."""


class ShowTimings(Question, frozen=True, kw_only=True, tag="show_timings.v1"):
    """Where did the time go, by rank and window? Anyone asks straggler."""

    measure: Name = "own"
    """`own`, `ratio`, `waited`, `step`, `cpu`, `runnable`, `round_trip`, or `section`."""
    section: str = ""
    """The section, if the measure is `section`."""
    first_rank: Int = 0
    """The first rank to show."""
    most_ranks: Int = 512
    """The most ranks to show."""
    most_windows: Int = 60
    """The most windows to show, the latest."""


class TimingRow(Part, frozen=True, kw_only=True, array_like=True):
    """One rank of a timing table."""

    rank: Count
    """The rank."""
    node: Name
    """The node of the rank."""
    role: str
    """The role group of the rank."""
    values: tuple[float | None, ...]
    """A value for each window, the oldest first; None where it is not known."""


class TimingTable(Reply, frozen=True, kw_only=True, tag="timing_table.v1"):
    """Ranks by windows, with gaps where nothing is known."""

    round: Count
    """The round."""
    measure: Name
    """The measure of the values."""
    windows: tuple[tuple[Int, Int], ...]
    """The first and the last step of each window, the oldest first."""
    rows: tuple[TimingRow, ...]
    """The ranks, by number."""
    next_rank: Int | None = None
    """The first rank that did not fit, if any."""
    sections: tuple[str, ...] = ()
    """The sections that a question may name."""
    is_by_time: bool = False
    """No SDK counts steps: a step is a second since 1970."""


class ShowHeatMap(Question, frozen=True, kw_only=True, tag="show_heat_map.v1"):
    """Where did the time go, as a picture of many ranks? Anyone asks straggler."""

    measure: Name = "own"
    """`own`, `ratio`, `waited`, `step`, `cpu`, `runnable`, `round_trip`, or `section`."""
    section: str = ""
    """The section, if the measure is `section`."""
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
    """Ranks by windows, two bytes a cell; with as many ranks as fit into a message."""

    round: Count
    """The round."""
    measure: Name
    """The measure of the values."""
    windows: tuple[tuple[Int, Int], ...]
    """The first and the last step of each window, the oldest first."""
    first_rank: Int
    """The first rank of this part; the others follow without a gap."""
    nodes: tuple[NodeRun, ...]
    """The nodes of the ranks, in this order."""
    low: float
    """The value of a cell of 1."""
    high: float
    """The value of a cell of 65 535."""
    cells: str
    """A cell for each rank and window, rank by rank: two bytes, little-endian, in base64. 0 means
    not known."""
    next_rank: Int | None = None
    """The first rank that did not fit, if any."""
    sections: tuple[str, ...] = ()
    """The sections that a question may name."""
    is_by_time: bool = False
    """No SDK counts steps: a step is a second since 1970."""


class ShowSwitches(Question, frozen=True, kw_only=True, tag="show_switches.v1"):
    """Which switches hold for slow ranks? Anyone asks straggler.

    The job is one job, or `everstep.subjects.CLUSTER` for all jobs without switches of their
    own.
    """


class SwitchInForce(Part, frozen=True, kw_only=True):
    """The value of one switch."""

    name: Name
    """The dotted name: `straggler.window_s`."""
    value: str
    """The value, as an operator would write it."""
    source: str
    """Where the value comes from: `default`, `settings`, `control`, `control of the job`, or
    `brake`."""


class SwitchTable(Reply, frozen=True, kw_only=True, tag="switch_table.v1"):
    """All switches of slow ranks."""

    switches: tuple[SwitchInForce, ...]
    """The switches, by name."""


class ReadClock(Question, frozen=True, kw_only=True, tag="read_clock.v1"):
    """What time is it? Agents ask straggler, to learn how far their own clock is ahead."""


class ClockReading(Reply, frozen=True, kw_only=True, tag="clock_reading.v1"):
    """The time of the replica that answers."""

    clock: Name
    """The replica."""
    at_s: float
    """Seconds since 1970, by its clock."""
