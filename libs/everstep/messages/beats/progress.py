"""What agents send once a second and no service keeps: the progress of their ranks."""

from everstep.messages.base import Count, Int, Message, Name, Part, Time
from everstep.messages.facts.health import SectionLimit


class RankBeat(Part, frozen=True, kw_only=True):
    """The progress of one rank, as its page shows it: a stuck rank has a page, too."""

    rank: Count
    """Its global rank."""
    state: Name = "running"
    """`starting`, `running`, `paused`, `stalled` or `exited`."""
    step: Count | None = None
    """The last step that it finished in this round."""
    progress_age_s: float = 0.0
    """Since its last progress, by the node's monotonic clock."""
    section: Name | None = None
    """The innermost section that is open."""
    section_age_s: float = 0.0
    """Since that section was entered."""
    limit_s: float | None = None
    """How long it may go without progress where it is now; None while it is not judged."""
    limit_source: str = ""
    """Where that limit comes from, as in `rank_stalled`."""
    collectives: Int | None = None
    """Collectives that it had entered in this round when it was last asked, where that can be
    read. Only ranks whose pages say nothing are asked."""
    collective: str | None = None
    """The collective that it was in when it was asked after its last progress; empty for none, None
    if nobody has asked."""
    resident_bytes: Int | None = None
    """Main memory of the process."""
    device_bytes: Int | None = None
    """Accelerator memory of the process."""


class SectionSeen(Part, frozen=True, kw_only=True):
    """How long a section took at most on the ranks of one node, since the round's first step."""

    section: Name
    """Its name; empty for the time outside all sections."""
    kind: Name
    """`plain`, `checkpoint`, `evaluation` or `heartbeat`."""
    longest_s: float
    """The longest time, on any of the ranks."""
    observations: Int
    """How often it ended, on all of them."""


class WardenPlace(Part, frozen=True, kw_only=True):
    """Where a node's warden answers whether it lives, for as long as its agent exists."""

    node: Name
    """The node."""
    address: Name
    """Where the other nodes of the job reach it."""
    port: Count
    """Of datagrams."""
    token: Name
    """What a question to it must contain; it answers nothing else."""


class ProbeBeat(Part, frozen=True, kw_only=True):
    """A probe: a check that runs in short intervals, also during a training."""

    check: Name
    """The check."""
    every_s: float
    """How often it runs; a costly one runs less often."""
    policy: Name
    """What its failure leads to: `observe`, `end_round` or `exclude`."""
    state: Name = ""
    """Its last result: `ok`, `warning`, `failed`, `unknown` or `unsupported`; empty before its
    first run."""
    failures: Int = 0
    """In how many runs in a row it has failed, up to now."""
    failures_limit: Int = 1
    """In how many runs in a row it must fail before it has failed."""
    has_failed: bool = False
    """It has failed, and has not recovered."""


class NodeBeat(Message, frozen=True, kw_only=True, tag="node_beat.v1"):
    """A node is alive, and how far its ranks are; its agent sends it once a second.

    Losable: nothing follows from one that is missing, and little from many.
    """

    job: Name
    """The job."""
    node: Name
    """The node."""
    sequence: Int
    """Grows by one a beat since the agent started, so that a receiver sees what it missed."""
    at: Time
    """The agent's wall clock. History compares it only to show which clocks are wrong."""
    state: Name
    """What the agent does: `joining`, `standby`, `starting`, `running`, `stopping`, `cut_off`
    (no control plane) or `leaving`."""
    round: Count | None = None
    """The round that it takes part in."""
    slot: Count | None = None
    """Its slot; None for a spare."""
    ranks: tuple[RankBeat, ...] = ()
    """All of its ranks."""
    watch: str = ""
    """Whether stalls are looked for, as in `watch_changed`; empty while no ranks run."""
    sections: tuple[SectionSeen, ...] = ()
    """How long sections take: with every tenth beat, so that no single one is needed."""
    config_fingerprint: str = ""
    """That of the job, with `sections`: limits are learned for one configuration."""
    limits: tuple[SectionLimit, ...] = ()
    """Each limit that can act on its ranks; from slot 0, with `sections` and when one changes."""
    warden: WardenPlace | None = None
    """Where others may ask whether its warden lives, should the agent itself not be heard."""
    alive: tuple[Name, ...] = ()
    """Nodes whose wardens have just answered it, as it was asked to find out."""
    cpu_ratio: float | None = None
    """How busy its processors are, 0 to 1."""
    memory_free_bytes: Int | None = None
    """Main memory that is available."""
    arena_bytes: Int | None = None
    """Shared memory that checkpoints take."""
    facts_waiting: Int = 0
    """Facts in its spool that the stream has not acknowledged."""
    probes_failed: tuple[Name, ...] = ()
    """The checks that run as probes and have failed."""
    probes: tuple[ProbeBeat, ...] = ()
    """All probes of the node: with every tenth beat, and when one of them changes."""
    probe_cpu_ratio: float = 0.0
    """The processor time of probes since the agent started, 1 for a whole core."""
    datagrams_dropped: Int = 0
    """Datagrams that its ranks could not deliver to it, since it started."""
