"""What agents send once a second and no service keeps: the progress of their ranks."""

from everstep.messages.base import Count, Int, Message, Name, Part, Time
from everstep.messages.facts.health import SectionLimit


class RankBeat(Part, frozen=True, kw_only=True):
    """The progress of one rank, as its page shows it: also that of a stuck rank."""

    rank: Count
    """The rank's number in the world."""
    state: Name = "running"
    """`starting`, `running`, `paused`, `stalled` or `exited`."""
    step: Count | None = None
    """The last step that the rank finished in this round."""
    progress_age_s: float = 0.0
    """The time since the rank's last progress, by the node's monotonic clock."""
    section: Name | None = None
    """The innermost section that is open."""
    section_age_s: float = 0.0
    """The time since the rank entered that section."""
    limit_s: float | None = None
    """How long the rank may go without progress in its present section; None while it is not
    judged."""
    limit_source: str = ""
    """Where that limit comes from, as in `rank_stalled`."""
    limit_name: Name = ""
    """The name of the limit, if it is not that of the section: the rank is late for this first."""
    collectives: Int | None = None
    """How many collectives the rank had entered in this round when it was last asked, where that
    can be read. Only ranks whose pages show nothing are asked."""
    collective: str | None = None
    """The collective in which the rank was when it was asked after its last progress; empty for
    none, None if it was not asked."""
    resident_bytes: Int | None = None
    """Main memory of the process."""
    device_bytes: Int | None = None
    """Accelerator memory of the process."""


class SectionSeen(Part, frozen=True, kw_only=True):
    """How long a section took at most on the ranks of one node, since the round's first step."""

    section: Name
    """The section's name; empty for the time outside all sections."""
    kind: Name
    """`plain`, `checkpoint`, `evaluation` or `heartbeat`."""
    longest_s: float
    """The longest duration, on any of the ranks."""
    observations: Int
    """How often the section ended, on all ranks of the node."""


class WardenPlace(Part, frozen=True, kw_only=True):
    """Where a node's warden answers whether it lives, as long as its agent exists."""

    node: Name
    """The node."""
    address: Name
    """The address at which the other nodes of the job reach the warden."""
    port: Count
    """The port for datagrams."""
    token: Name
    """The text that a question to the warden must contain; the warden answers nothing else."""


class ProbeBeat(Part, frozen=True, kw_only=True):
    """A probe: a check that runs in short intervals, also during a training."""

    check: Name
    """The check."""
    every_s: float
    """How often the probe runs; a costly probe runs less often."""
    policy: Name
    """What its failure leads to: `observe`, `end_round` or `exclude`."""
    state: Name = ""
    """The last result: `ok`, `warning`, `failed`, `unknown` or `unsupported`; empty before the
    first run."""
    failures: Int = 0
    """In how many runs in a row, up to now, the result was a failure."""
    failures_limit: Int = 1
    """In how many runs in a row the result must be a failure before the probe has failed."""
    has_failed: bool = False
    """The probe has failed, and has not recovered."""


class NodeBeat(Message, frozen=True, kw_only=True, tag="node_beat.v1"):
    """A node is alive, and how far its ranks are; its agent sends this once a second.

    Beats may be lost: nothing follows from a missing beat, and little from many.
    """

    job: Name
    """The job."""
    node: Name
    """The node."""
    sequence: Int
    """A number that grows by one with each beat since the agent started, so that a receiver sees
    what it missed."""
    at: Time
    """The agent's wall clock. History compares it only to show which clocks are wrong."""
    state: Name
    """What the agent does: `joining`, `standby`, `starting`, `running`, `stopping`, `cut_off`
    (no control plane) or `leaving`."""
    round: Count | None = None
    """The round in which the node takes part."""
    slot: Count | None = None
    """The node's slot; None for a spare."""
    ranks: tuple[RankBeat, ...] = ()
    """All ranks of the node."""
    watch: str = ""
    """Whether stalls are looked for, as in `watch_changed`; empty while no ranks run."""
    sections: tuple[SectionSeen, ...] = ()
    """How long sections take: with every tenth beat, so that a single beat may be lost."""
    config_fingerprint: str = ""
    """The configuration of the job, with `sections`: limits are learned for one configuration."""
    limits: tuple[SectionLimit, ...] = ()
    """Each limit that can act on the node's ranks; from slot 0, with `sections` and when a limit
    changes."""
    warden: WardenPlace | None = None
    """Where others may ask the node's warden whether it lives, if the agent itself is not heard."""
    alive: tuple[Name, ...] = ()
    """Nodes whose wardens have just answered this agent, which was asked to find out."""
    cpu_ratio: float | None = None
    """How busy the node's processors are, 0 to 1."""
    load_ratio: float = 0.0
    """How many tasks run or wait to run, for each processor of the host: the mean of the last ten
    beats; 0 if it is not known."""
    late_s: float = 0.0
    """How much later than due the agent sent one of its last ten beats, at most."""
    memory_free_bytes: Int | None = None
    """Main memory that is available."""
    arena_bytes: Int | None = None
    """Shared memory that checkpoints use."""
    facts_waiting: Int = 0
    """Facts in the node's spool that the stream has not acknowledged."""
    probes_failed: tuple[Name, ...] = ()
    """The checks that run as probes and have failed."""
    probes: tuple[ProbeBeat, ...] = ()
    """All probes of the node: with every tenth beat, and when one of them changes."""
    probe_cpu_ratio: float = 0.0
    """The processor time of probes since the agent started, 1 for a whole core."""
    datagrams_dropped: Int = 0
    """Datagrams from ranks that were lost on the way to the agent, since the agent started."""
