"""Slow ranks: by how much, why, and what was requested about them."""

from everstep.messages.base import Count, Int, Name, Part, RoundFact


class Score(Part, frozen=True, kw_only=True):
    """One signal about one rank: 1 is as fast as the reference, 0.5 takes twice as long."""

    signal: Name
    """`own` (the rank's own time), `section:forward`, `cpu`, `runnable` or `gpu`."""
    relative_score: float | None = None
    """Against the median of its role group."""
    individual_score: float | None = None
    """Against its own best window."""
    value_s: float | None = None
    """Its own median in the window."""
    reference_s: float | None = None
    """The role group's median in the window."""


class StragglerFound(RoundFact, frozen=True, kw_only=True, tag="straggler_found.v1"):
    """A finding: a rank is slower than its peers, for long enough; straggler sends it once."""

    node: Name
    """The node."""
    slot: Count
    """The node's slot."""
    rank: Count
    """The rank."""
    cause: Name
    """`input`, `compute`, `host`, `network`, `device`, `design` or `unknown`."""
    reason: str
    """The numbers, the limits that they passed, and for how long."""
    role: Name = ""
    """The role group that it was compared with."""
    section: Name | None = None
    """The section that it loses the time in."""
    scores: tuple[Score, ...] = ()
    """The signals that speak against it, the strongest first."""
    lateness_s: float | None = None
    """By how much it is late at collectives: the median of the operation where it is the latest."""
    slowdown_ratio: float | None = None
    """How much faster the whole job would be without it: 0.12 for 12 %."""
    windows: Int = 0
    """For how many windows in a row."""
    confidence: float | None = None
    """0 to 1."""
    failure_class: Name = ""
    """What would help: `reset`, `replace`, `watch`, or `tune` (the script, not the node)."""


class StragglerCleared(RoundFact, frozen=True, kw_only=True, tag="straggler_cleared.v1"):
    """A slow rank keeps up again, or is gone; straggler sends it once."""

    node: Name
    """The node."""
    rank: Count
    """The rank."""
    reason: str
    """The numbers, or that its round ended."""
    finding: str
    """The id of the `straggler_found` that is over."""
    lasted_s: float | None = None
    """For how long it was slow."""
    lost_s: float | None = None
    """Time that the whole job lost by it: the sum over its windows of what each cost."""


class StepTimeShifted(RoundFact, frozen=True, kw_only=True, tag="step_time_shifted.v1"):
    """A finding: the whole job became slower or faster, and no rank stands out.

    Straggler sends it on the change.
    """

    before_s: float
    """The median step before."""
    now_s: float
    """The median step now."""
    step: Count
    """Where it changed."""
    reason: str
    """What changed at the same time, if that is known."""
    section: Name | None = None
    """The section in which most of the change is."""


class StragglerActed(RoundFact, frozen=True, kw_only=True, tag="straggler_acted.v1"):
    """What the policy for slow ranks asks for; straggler sends it once for each finding."""

    node: Name
    """The node."""
    rank: Count
    """The slow rank."""
    finding: str
    """The id of the `straggler_found` that it answers."""
    action: Name
    """`stop` (the job) or `exclude` (the node)."""
    outcome: Name
    """`asked` (and others have agreed), `observed` (the mode or the brake forbids more) or
    `refused`."""
    reason: str
    """The rule and its numbers, and why it was not done if so."""
