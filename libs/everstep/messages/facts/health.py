"""Which nodes are lost, suspect, checked or excluded, and which limits have been learned."""

from everstep.messages.base import Count, Fact, Int, Name, Part, RoundFact


class CheckResult(Part, frozen=True, kw_only=True):
    """The result of one check of one part of a node."""

    check: Name
    """Its name, as in `everstep check <name>`: `gpu`, `nvlink`, `nic`, `storage`, `host`."""
    state: Name
    """`ok`, `warning`, `failed`, `unknown` (it could not tell) or `unsupported`; only
    `failed` may count against a node."""
    reason: str = ""
    """What was measured, past which limit; empty for `ok`."""
    subject: str = ""
    """The part of the node that it is about: `GPU-5e9c…`, `mlx5_0`, `/data`."""
    failure_class: Name = ""
    """What would help: `reset`, `reboot`, `replace`, `drain`, `watch` or `report`."""
    code: str = ""
    """The part's own code for it: `XID 79`, `GPU_RECOVERY_ACTION=NODE_REBOOT`."""
    took_s: float = 0.0
    """How long it ran."""
    nvlink_domain: Name = ""
    """Of a GPU: its NVLink domain, named by the ClusterUUID of its fabric; empty for none."""


class SectionLimit(Part, frozen=True, kw_only=True):
    """How long a section may take before its rank has stalled."""

    section: Name
    """Its name; the empty string stands for the time outside all sections."""
    limit_s: float
    """The limit."""
    source: Name
    """`learned`, `configured`, `default`, `floor` or `cap`: which rule set it."""
    longest_s: float | None = None
    """The longest that was seen on any rank, the base of a learned limit."""
    observations: Int = 0
    """How often it was seen to end, on the node that saw it most often."""
    kind: Name = ""
    """`plain`, `checkpoint`, `evaluation` or `heartbeat`; empty while it was never seen."""
    origin: Name = ""
    """Where it was set: an option, a setting, `everstep limits`; and further remarks about it."""


class NodeLost(Fact, frozen=True, kw_only=True, tag="node_lost.v1"):
    """Nothing was heard of a node past the limit, and its training does not move.

    Health sends it.
    """

    node: Name
    """The node."""
    silence_s: float
    """Since its last sign of life, by the observer's clock."""
    limit_s: float
    """The limit that it passed."""
    reason: str
    """What was heard last, and what else was looked at."""
    blind_s: float = 0.0
    """Time in which the observer itself heard nobody: already subtracted from the silence."""
    slot: Count | None = None
    """The slot that it holds, if any."""
    last_step: Count | None = None
    """The last step that it reported."""
    is_confirmed: bool = False
    """The scheduler or its host confirms it."""
    is_replaced: bool = False
    """A newer round had formed without it: an incident of its round says what that was."""


class NodeReturned(Fact, frozen=True, kw_only=True, tag="node_returned.v1"):
    """A node that had been lost is heard again; health sends it."""

    node: Name
    """The node."""
    away_s: float
    """How long it was silent."""
    reason: str = ""
    """What it says about its absence: no bus, a paused host, a restart."""
    loss: str = ""
    """The id of the `node_lost` that is over."""
    how: Name = ""
    """`restarted` (another agent), `paused` (it sent nothing) or `cut_off` (it was not heard)."""


class NodeSuspected(Fact, frozen=True, kw_only=True, tag="node_suspected.v1"):
    """A finding: a node may be bad. Health sends it once per cause, with what it has."""

    node: Name
    """The node."""
    cause: Name
    """`check`, `probe` (its policy is `exclude`, and another node passes it), `incidents` (it was
    the culprit too often), `straggler` or `operator`."""
    reason: str
    """The evidence, and the limit that it passed."""
    failure_class: Name = ""
    """What would help: `reset`, `reboot`, `replace`, `drain`, `watch` or `report`."""
    strikes: Int = 0
    """Strikes in the window, over all jobs."""
    strikes_limit: Int | None = None
    """How many make it suspect."""
    window_s: float | None = None
    """How far back strikes count."""
    checks: tuple[CheckResult, ...] = ()
    """The checks that speak against it."""
    evidence: tuple[str, ...] = ()
    """The ids of the facts that speak against it."""


class NodeCleared(Fact, frozen=True, kw_only=True, tag="node_cleared.v1"):
    """A node is no longer suspect; health sends it."""

    node: Name
    """The node."""
    reason: str
    """What speaks for it now, or whose word it is."""
    suspicion: str = ""
    """The id of the `node_suspected` that is over."""


class NodeCheckFinished(Fact, frozen=True, kw_only=True, tag="node_check_finished.v1"):
    """A node was examined; its agent sends it at each join, on each change and when asked.

    While a check fails, it sends one for each examination: only what is found again counts
    against a node.
    """

    node: Name
    """The node."""
    occasion: Name
    """`join`, `periodic`, `prolog`, `incident`, `operator`, or `probe` (one check that runs in
    short intervals has failed, still fails, or passes again)."""
    is_healthy: bool
    """No check failed. What a check could not tell is not a failure."""
    took_s: float
    """How long all of them took."""
    results: tuple[CheckResult, ...] = ()
    """Each check's answer; when all is well, only those that are not `ok`."""
    checks: tuple[str, ...] = ()
    """The names of all checks that ran."""
    policy: Name = ""
    """For a probe: `observe`, `end_round` or `exclude`, what its failure leads to."""
    failures: Int = 0
    """For a probe that fails: in how many runs in a row."""
    cpu_ratio: float | None = None
    """For a probe: the processor time of all probes of the node so far, 1 for a whole core."""
    is_acted_on: bool = False
    """For a probe: a round was ended for this failure, since other nodes pass the same check."""


class NetworkLink(Part, frozen=True, kw_only=True):
    """How fast one node was with another."""

    node: Name
    """The other one."""
    mib_s: float
    """What arrived there; 0 if it was not reached."""
    round_trip_s: float | None = None
    """The median of small messages; None if it was not reached."""
    reason: str = ""
    """Why it was not reached."""


class NetworkMeasured(Fact, frozen=True, kw_only=True, tag="network_measured.v1"):
    """A node has taken its turns in a network test; its agent sends it.

    Of each pair one measures. A slow pair alone speaks against neither of its nodes, so no
    figure of one node is a failed check.
    """

    node: Name
    """The node."""
    test: str
    """The id of the `measure_network`."""
    nodes: tuple[Name, ...]
    """All who were to take part, so each of them has one of these facts."""
    took_s: float
    """How long all of its turns took."""
    links: tuple[NetworkLink, ...] = ()
    """What it measured itself."""
    reason: str = ""
    """Why others could not measure the way to it, if so."""


class CheckDistrusted(Fact, frozen=True, kw_only=True, tag="check_distrusted.v1"):
    """A finding: a check fails on too many nodes at once, so the check is to blame.

    Health sends it, and lets the check count against nobody.
    """

    check: Name
    """The check."""
    nodes_failed: Int
    """Nodes on which it failed."""
    nodes_checked: Int
    """Nodes on which it ran."""
    reason: str
    """The limit, and what the nodes have in common."""


class CheckTrusted(Fact, frozen=True, kw_only=True, tag="check_trusted.v1"):
    """A distrusted check counts again; health sends it."""

    check: Name
    """The check."""
    reason: str
    """Why."""


class NodeExcluded(Fact, frozen=True, kw_only=True, tag="node_excluded.v1"):
    """A node may not join until its time is over; health sends it for itself or an operator."""

    node: Name
    """The node."""
    by: Name
    """Who decided: `health`, or an operator's name."""
    reason: str
    """The evidence, and the limit that it passed."""
    ttl_s: float | None = None
    """How long; None until somebody includes it again, which only an operator may ask."""
    mode: Name = "enforce"
    """`enforce`, or `observe`: it would have been excluded, and was not."""
    decision: Name | None = None
    """The id of the `action_decided` behind it, if there was one."""
    exclusions_in_window: Int = 0
    """Automatic exclusions that the breaker has counted, this one included."""


class NodeIncluded(Fact, frozen=True, kw_only=True, tag="node_included.v1"):
    """An excluded node may join again; health sends it."""

    node: Name
    """The node."""
    by: Name
    """Who decided: `health` (its time is over), or an operator's name."""
    reason: str
    """Why."""


class BreakerOpened(Fact, frozen=True, kw_only=True, tag="breaker_opened.v1"):
    """Too many exclusions in a short time: health makes no more by itself, and sends it."""

    exclusions: Int
    """Exclusions in the window."""
    limit: Int
    """How many it may make."""
    window_s: float
    """The window."""
    reason: str
    """What they had in common."""


class BreakerClosed(Fact, frozen=True, kw_only=True, tag="breaker_closed.v1"):
    """Health may exclude nodes again, and sends it."""

    by: Name
    """`health` (the window has passed), or an operator's name."""
    reason: str
    """Why."""


class StallLocated(RoundFact, frozen=True, kw_only=True, tag="stall_located.v1"):
    """A finding: who stopped first, and who merely waits for them; health sends it."""

    first_ranks: tuple[Int, ...]
    """The ranks that stopped first."""
    reason: str
    """The order of events, as far as beats can show it."""
    nodes: tuple[Name, ...] = ()
    """The nodes of the first ranks."""
    waiting_ranks: Int = 0
    """How many others wait."""
    section: Name | None = None
    """The section that the first ranks are in."""
    lead_s: float | None = None
    """How long before all others they stopped."""
    is_certain: bool = False
    """No beat that could contradict it is missing."""


class LimitsLearned(Fact, frozen=True, kw_only=True, tag="limits_learned.v1"):
    """The limits of a job changed; health sends it with the revision that agents now read."""

    limits: tuple[SectionLimit, ...]
    """All limits that are in force."""
    changed: tuple[str, ...]
    """The sections whose limit differs from before."""
    reason: str
    """The rule, and the numbers that went into it."""
    revision: Count | None = None
    """The revision of the job's document in `LIMITS`."""


class ObserverBlinded(Fact, frozen=True, kw_only=True, tag="observer_blinded.v1"):
    """A service heard nobody for a while and judged nobody by that; it sends it afterwards."""

    blind_s: float
    """How long."""
    reason: str
    """What was away: the bus, the service's own process, the network."""
