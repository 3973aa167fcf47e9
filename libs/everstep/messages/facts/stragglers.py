"""Slow ranks: by how much, why, and what was requested about them."""

from everstep.messages.base import Count, Int, Name, Part, RoundFact


class Score(Part, frozen=True, kw_only=True):
    """One signal about one rank: 1 is as fast as the reference, 0.5 takes twice as long."""

    signal: Name
    """`own` (the rank's own time), `section:forward`, `cpu`, `runnable` or `gpu`."""
    relative_score: float | None = None
    """The rank's speed, compared with the median of its role group."""
    individual_score: float | None = None
    """The rank's speed, compared with its own best window."""
    value_s: float | None = None
    """The rank's own median in the window."""
    reference_s: float | None = None
    """The role group's median in the window."""


class StragglerFound(RoundFact, frozen=True, kw_only=True, tag="straggler_found.v1"):
    """A finding: a rank is slower than its peers, for long enough; straggler sends this once."""

    node: Name
    """The node."""
    slot: Count
    """The node's slot."""
    rank: Count
    """The rank."""
    cause: Name
    """`input`, `compute`, `host`, `network`, `device`, `design`, `injected` or `unknown`."""
    reason: str
    """The numbers, the limits that they passed, and for how long."""
    role: Name = ""
    """The role group that the rank was compared with."""
    section: Name | None = None
    """The section in which the rank loses the time."""
    scores: tuple[Score, ...] = ()
    """The signals that speak against the rank, the strongest first."""
    lateness_s: float | None = None
    """How late the rank enters collectives: the median of the operation for which it is the
    latest."""
    slowdown_ratio: float | None = None
    """How much faster the whole job would be without this rank's delay: 0.12 for 12 %."""
    windows: Int = 0
    """In how many windows in a row the rank was slow."""
    confidence: float | None = None
    """0 to 1."""
    failure_class: Name = ""
    """What would help: `reset`, `replace`, `watch`, or `tune` (the script, not the node)."""


class StragglerCleared(RoundFact, frozen=True, kw_only=True, tag="straggler_cleared.v1"):
    """A slow rank keeps up again, or is gone; straggler sends this once."""

    node: Name
    """The node."""
    rank: Count
    """The rank."""
    reason: str
    """The numbers, or that the rank's round ended."""
    finding: str
    """The id of the `straggler_found` that is over."""
    lasted_s: float | None = None
    """How long the rank was slow."""
    lost_s: float | None = None
    """The time that the whole job lost because of the rank: the sum over its slow windows."""


class StepTimeShifted(RoundFact, frozen=True, kw_only=True, tag="step_time_shifted.v1"):
    """A finding: the whole job became slower or faster, and no rank stands out.

    Straggler sends it on the change.
    """

    before_s: float
    """The median step before."""
    now_s: float
    """The median step now."""
    step: Count
    """The step at which the step time changed."""
    reason: str
    """What changed at the same time, if that is known."""
    section: Name | None = None
    """The section that contributes most to the change."""


class StragglerActed(RoundFact, frozen=True, kw_only=True, tag="straggler_acted.v1"):
    """What the policy for slow ranks asks for; straggler sends this once for each finding."""

    node: Name
    """The node."""
    rank: Count
    """The slow rank."""
    finding: str
    """The id of the `straggler_found` that led to the action."""
    action: Name
    """`stop` (the job) or `exclude` (the node)."""
    outcome: Name
    """`asked` (the action was requested), `observed` (the mode or the brake allows no more) or
    `refused`."""
    reason: str
    """The rule and its numbers, and why the action was not taken if so."""


class HeatMapDrawn(RoundFact, frozen=True, kw_only=True, tag="heat_map_drawn.v1"):
    """The own times of ranks in the last windows of a job that has ended, as a picture.

    Straggler sends it before it forgets the job. A large job has several parts.
    """

    windows: tuple[tuple[Int, Int], ...]
    """The first and the last step of each window, the oldest first."""
    first_rank: Count
    """The first rank of this part; the others follow without a gap."""
    nodes: tuple[tuple[Name, Count], ...]
    """The nodes of the ranks, in this order, each with its number of ranks."""
    low: float
    """The value of a cell of 1, in seconds."""
    high: float
    """The value of a cell of 65 535."""
    cells: str
    """A cell for each rank and window, rank by rank: two bytes, little-endian, in base64. 0 means
    not known."""
    is_by_time: bool = False
    """No SDK counts steps: a step is a second since 1970."""
