"""Which nodes are lost, suspect, checked or excluded, and which limits have been learned."""

from everstep.messages.base import Count, Fact, Int, Name, Part, RoundFact


class CheckResult(Part, frozen=True, kw_only=True):
    """The result of one check of one part of a node."""

    check: Name
    """The name of the check, as in `everstep check <name>`: `gpu`, `nvlink`, `nic`, `storage`,
    `host`."""
    state: Name
    """`ok`, `warning`, `failed`, `unknown` (the check could not decide) or `unsupported`; only
    `failed` may count against a node."""
    reason: str = ""
    """What was measured, and which limit was passed; empty for `ok`."""
    subject: str = ""
    """The part of the node that the result is about: `GPU-5e9c…`, `mlx5_0`, `/data`."""
    failure_class: Name = ""
    """What would help: `reset`, `reboot`, `replace`, `drain`, `watch` or `report`."""
    code: str = ""
    """The part's own code for the failure: `XID 79`, `GPU_RECOVERY_ACTION=NODE_REBOOT`."""
    took_s: float = 0.0
    """How long the check ran."""
    nvlink_domain: Name = ""
    """For a GPU: its NVLink domain, named by the ClusterUUID of its fabric; empty for none."""


class SectionLimit(Part, frozen=True, kw_only=True):
    """How long a section may take before its rank has stalled."""

    section: Name
    """The section's name; the empty string stands for the time outside all sections."""
    limit_s: float
    """The limit."""
    source: Name
    """The rule that set the limit: `learned`, `configured`, `default`, `floor` or `cap`."""
    longest_s: float | None = None
    """The longest duration on any rank, the base of a learned limit."""
    observations: Int = 0
    """How often the section has ended, on the node where it ended most often."""
    kind: Name = ""
    """`plain`, `checkpoint`, `evaluation` or `heartbeat`; empty before the section ran for the
    first time."""
    origin: Name = ""
    """Where somebody has set the limit (an option, a setting, `everstep limits`), and further
    remarks."""


class NodeLost(Fact, frozen=True, kw_only=True, tag="node_lost.v1"):
    """A node has been silent past the limit, and its training makes no progress.

    Health sends this.
    """

    node: Name
    """The node."""
    silence_s: float
    """The time since the node's last sign of life, by the observer's clock."""
    limit_s: float
    """The limit that was passed."""
    reason: str
    """What was heard last, and what else was examined."""
    blind_s: float = 0.0
    """Time in which the observer itself heard nobody: already subtracted from the silence."""
    slot: Count | None = None
    """The slot that the node holds, if any."""
    last_step: Count | None = None
    """The last step that the node reported."""
    is_confirmed: bool = False
    """The scheduler, or the node's host, confirms the loss."""
    is_replaced: bool = False
    """A newer round had formed without the node; an incident of the node's round tells why."""
    overload: str = ""
    """Why the silence tells little of the node: its processors were overloaded, or health itself
    was blind. Empty if neither is known."""
    is_warden_alive: bool = False
    """Only the node's agent is silent: the warden of its ranks answers."""


class NodeReturned(Fact, frozen=True, kw_only=True, tag="node_returned.v1"):
    """A node that had been lost is heard again; health sends this."""

    node: Name
    """The node."""
    away_s: float
    """How long the node was silent."""
    reason: str = ""
    """How the node explains its absence: no bus, a paused host, a restart."""
    loss: str = ""
    """The id of the `node_lost` that is over."""
    how: Name = ""
    """`restarted` (another agent), `paused` (the node sent nothing) or `cut_off` (it was not
    heard)."""
    lost_round: Count | None = None
    """The round in which the node was lost, if it took part in one."""


class NodeSuspected(Fact, frozen=True, kw_only=True, tag="node_suspected.v1"):
    """A finding: a node may be bad. Health sends this once per cause, with the evidence."""

    node: Name
    """The node."""
    cause: Name
    """`check`, `probe` (with the policy `exclude`, and another node passes it), `incidents` (the
    node was the culprit too often), `straggler` or `operator`."""
    reason: str
    """The evidence, and the limit that was passed."""
    failure_class: Name = ""
    """What would help: `reset`, `reboot`, `replace`, `drain`, `watch` or `report`."""
    strikes: Int = 0
    """The node's strikes in the window, over all jobs."""
    strikes_limit: Int | None = None
    """The number of strikes that makes a node suspect."""
    window_s: float | None = None
    """How far back strikes count."""
    checks: tuple[CheckResult, ...] = ()
    """The check results that speak against the node."""
    evidence: tuple[str, ...] = ()
    """The ids of the facts that speak against the node."""


class NodeCleared(Fact, frozen=True, kw_only=True, tag="node_cleared.v1"):
    """A node is no longer suspect; health sends this."""

    node: Name
    """The node."""
    reason: str
    """What speaks for the node now, or which person decided."""
    suspicion: str = ""
    """The id of the `node_suspected` that is over."""


class NodeCheckFinished(Fact, frozen=True, kw_only=True, tag="node_check_finished.v1"):
    """A node was examined: at each join, on each change, or on request; its agent sends this.

    While a check fails, the agent sends one fact for each examination: only a failure that
    repeats counts against a node.
    """

    node: Name
    """The node."""
    occasion: Name
    """`join`, `periodic`, `prolog`, `incident`, `operator`, or `probe` (one check that runs in
    short intervals has failed, still fails, or passes again)."""
    is_healthy: bool
    """No check failed. A check that could not decide has not failed."""
    took_s: float
    """How long all checks took."""
    results: tuple[CheckResult, ...] = ()
    """The result of each check; when all is well, only those that are not `ok`."""
    checks: tuple[str, ...] = ()
    """The names of all checks that ran."""
    policy: Name = ""
    """For a probe: what its failure leads to, `observe`, `end_round` or `exclude`."""
    failures: Int = 0
    """For a probe that fails: in how many runs in a row it has failed."""
    cpu_ratio: float | None = None
    """For a probe: the processor time of all probes of the node so far, 1 for a whole core."""
    is_acted_on: bool = False
    """For a probe: a round was ended for this failure, since other nodes pass the same check."""


class NetworkLink(Part, frozen=True, kw_only=True):
    """The speed of the network between one node and another."""

    node: Name
    """The other node."""
    mib_s: float
    """The rate at which data arrived at the other node; 0 if it was not reached."""
    round_trip_s: float | None = None
    """The median round trip of small messages; None if the other node was not reached."""
    reason: str = ""
    """Why the other node was not reached, or why the two could not add numbers."""
    backend: Name = ""
    """The backend over which the two added numbers, as ranks do; empty if they did not."""
    sums_mib_s: float | None = None
    """The rate of these sums, on the slowest GPU; 0 if they failed or one was wrong, None if they
    were not part of the test."""

    @property
    def speed_mib_s(self) -> float:
        """What counts: the sums, where they are part of the test."""
        return self.mib_s if self.sums_mib_s is None else self.sums_mib_s


class NetworkFigures(Part, frozen=True, kw_only=True):
    """A node's part in a network test, as its agent tells rendezvous."""

    test: str
    """The id of the `measure_network`."""
    node: Name
    """The node."""
    fact: Name
    """The id of the `network_measured` with the details."""
    links: tuple[NetworkLink, ...] = ()
    """As in `network_measured`."""
    reason: str = ""
    """As in `network_measured`."""


class NetworkMeasured(Fact, frozen=True, kw_only=True, tag="network_measured.v1"):
    """A node has taken its turns in a network test; its agent sends this.

    One node of each pair measures. A slow pair alone speaks against neither of its nodes, so no
    figure of one node is a failed check.
    """

    node: Name
    """The node."""
    test: str
    """The id of the `measure_network`."""
    nodes: tuple[Name, ...]
    """All nodes of the test; each of them has one of these facts."""
    took_s: float
    """How long all turns of this node took."""
    links: tuple[NetworkLink, ...] = ()
    """The links that this node measured."""
    reason: str = ""
    """Why others could not measure their link to this node, if so."""


class CheckDistrusted(Fact, frozen=True, kw_only=True, tag="check_distrusted.v1"):
    """A finding: a check fails on too many nodes at once, so the check is to blame.

    Health sends this; from then on the check counts against no node.
    """

    check: Name
    """The check."""
    nodes_failed: Int
    """The number of nodes on which the check failed."""
    nodes_checked: Int
    """The number of nodes on which the check ran."""
    reason: str
    """The limit, and what the nodes have in common."""


class CheckTrusted(Fact, frozen=True, kw_only=True, tag="check_trusted.v1"):
    """A distrusted check counts again; health sends this."""

    check: Name
    """The check."""
    reason: str
    """Why."""


class NodeExcluded(Fact, frozen=True, kw_only=True, tag="node_excluded.v1"):
    """A node may not join for some time; health sends this for itself or for an operator."""

    node: Name
    """The node."""
    by: Name
    """Who decided: `health`, or the operator's name."""
    reason: str
    """The evidence, and the limit that was passed."""
    ttl_s: float | None = None
    """How long the exclusion lasts; None until somebody includes the node again, which only an
    operator may ask for."""
    mode: Name = "enforce"
    """`enforce`, or `observe`: the node was not excluded, but would have been."""
    decision: Name | None = None
    """The id of the `action_decided` that led to the exclusion, if there was one."""
    exclusions_in_window: Int = 0
    """Automatic exclusions that the breaker has counted, this one included."""


class NodeIncluded(Fact, frozen=True, kw_only=True, tag="node_included.v1"):
    """An excluded node may join again; health sends this."""

    node: Name
    """The node."""
    by: Name
    """Who decided: `health` (the time is over), or the operator's name."""
    reason: str
    """Why."""


class BreakerOpened(Fact, frozen=True, kw_only=True, tag="breaker_opened.v1"):
    """Health excluded too many nodes in a short time, and excludes none by itself now."""

    exclusions: Int
    """The number of exclusions in the window."""
    limit: Int
    """The number of exclusions that the window allows."""
    window_s: float
    """The length of the window."""
    reason: str
    """What the exclusions had in common."""


class BreakerClosed(Fact, frozen=True, kw_only=True, tag="breaker_closed.v1"):
    """Health may exclude nodes by itself again."""

    by: Name
    """`health` (the window has passed), or the operator's name."""
    reason: str
    """Why."""


class StallLocated(RoundFact, frozen=True, kw_only=True, tag="stall_located.v1"):
    """A finding: which ranks stopped first, and how many merely wait; health sends this."""

    first_ranks: tuple[Int, ...]
    """The ranks that stopped first."""
    reason: str
    """The order of events, as far as beats can show it."""
    nodes: tuple[Name, ...] = ()
    """The nodes of the first ranks."""
    waiting_ranks: Int = 0
    """How many other ranks wait."""
    section: Name | None = None
    """The section in which the first ranks are."""
    lead_s: float | None = None
    """How long before all others the first ranks stopped."""
    is_certain: bool = False
    """Every beat that could contradict the finding has arrived."""


class LimitsLearned(Fact, frozen=True, kw_only=True, tag="limits_learned.v1"):
    """The limits of a job changed; health sends this with the revision that agents read now."""

    limits: tuple[SectionLimit, ...]
    """All limits that hold."""
    changed: tuple[str, ...]
    """The sections whose limit differs from before."""
    reason: str
    """The rule, and the numbers that the rule was applied to."""
    revision: Count | None = None
    """The revision of the job's document in `LIMITS`."""


class ObserverBlinded(Fact, frozen=True, kw_only=True, tag="observer_blinded.v1"):
    """A service heard no node for a while, and judged none; it sends this afterwards."""

    blind_s: float
    """How long the service heard nobody."""
    reason: str
    """What was away: the bus, the service's own process, the network."""
