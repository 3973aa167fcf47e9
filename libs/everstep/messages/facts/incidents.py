"""What went wrong, on which evidence, who caused it, what was done, and what it cost."""

from everstep.messages.base import BlobRef, Count, Fact, Int, Name, Part, Time

CAPTURE = "capture-"
"""The prefix of a capture's id, which stands in place of an incident's id."""


def is_capture(incident: str) -> bool:
    """Evidence with this in place of an incident's id belongs to no incident."""
    return incident.startswith(CAPTURE)


class IncidentFact(Fact, frozen=True, kw_only=True):
    """A fact about one incident."""

    incident: Name
    """The incident's id."""


class IncidentOpened(IncidentFact, frozen=True, kw_only=True, tag="incident_opened.v1"):
    """The first sign of trouble; rendezvous sends it with the report that ended the round."""

    trigger: Name
    """The kind of the first report: `rank_exited`, `rank_stalled`, `node_lost` …"""
    reason: str
    """What happened, to whom, past which limit."""
    trigger_fact: Name | None = None
    """The first report's id."""
    node: Name | None = None
    """The node that it is about."""
    rank: Count | None = None
    """The rank that it is about."""
    step: Count | None = None
    """The last step that the training finished."""
    phase: Name = ""
    """Where the training was: `start`, `first_step`, `step`, `checkpoint`, `restore` …"""
    section: Name | None = None
    """The section that the rank was in."""
    last_progress_at: Time | None = None
    """When the training last moved: the ledger counts from here."""


class IncidentExtended(IncidentFact, frozen=True, kw_only=True, tag="incident_extended.v1"):
    """Further reports belong to an open incident.

    Rendezvous sends it once a second at most, so that a thousand reports are a few facts.
    """

    reports: tuple[str, ...]
    """The ids of the reports, at most 100."""
    nodes: tuple[Name, ...] = ()
    """The nodes that they are about, at most 100."""
    ranks: Count = 0
    """How many ranks are affected by now."""
    reason: str = ""
    """What they say together."""


class EvidenceCollected(IncidentFact, frozen=True, kw_only=True, tag="evidence_collected.v1"):
    """A piece of evidence, or that there is none and why; the agent sends it for each.

    Of a capture, `incident` is `capture-` and its id, and no incident is counted.
    """

    node: Name
    """The node that it comes from."""
    evidence: Name
    """`exception`, `log`, `flight_recorder`, `stacks`, `kernel_log`, `gpu`, `cgroup`,
    `environment`, `page`, `process` (what the kernel says of the ranks that still lived) or
    `check`. The blob of `flight_recorder` and `stacks` is an archive of a file a rank."""
    rank: Count | None = None
    """The rank that it is about; None for the node."""
    blob: BlobRef | None = None
    """Where it is; None when there is none."""
    summary: str = ""
    """What it says in a line, where the agent can tell."""
    missing: str = ""
    """Why there is none: `not armed`, `the rank had exited`, `timed out after 5 s` …"""
    took_s: float = 0.0
    """How long it took to get."""

    @property
    def is_of_capture(self) -> bool:
        """A person requested it: it belongs to no incident."""
        return is_capture(self.incident)


class EvidenceItem(Part, frozen=True, kw_only=True):
    """What a verdict rests on."""

    says: str
    """What it says, in words: `rank 7 never entered all_reduce 1204`."""
    analyzer: str = ""
    """The analyzer that found it: `flight_recorder`, `stacks`, `logs`, `health`, `history`."""
    fact: str | None = None
    """The fact that it comes from."""
    blob: BlobRef | None = None
    """The blob that it comes from."""
    weight: float = 0.0
    """How much it counts, 0 to 1; below 0 when it speaks against."""


class Alternative(Part, frozen=True, kw_only=True):
    """Another explanation, and why it was not chosen."""

    cause: Name
    """Its cause class."""
    confidence: float
    """0 to 1."""
    reason: str
    """What speaks for it, and what against."""
    ranks: tuple[Int, ...] = ()
    """The ranks that it would blame."""
    nodes: tuple[Name, ...] = ()
    """The nodes that it would blame."""


class VerdictReached(IncidentFact, frozen=True, kw_only=True, tag="verdict_reached.v1"):
    """Who caused an incident, and what kind of failure it is.

    Attribution sends it, and again when later evidence changes it. It is advice: no
    restart waits for it.
    """

    cause: Name
    """The cause class: `user_code`, `configuration`, `data`, `framework`, `gpu`, `host`, `network`,
    `storage`, `scheduler` or `unknown`."""
    confidence: float
    """0 to 1."""
    reason: str
    """The explanation, in the words that a person reads first."""
    culprit_ranks: tuple[Int, ...] = ()
    """The ranks that caused it; those that merely waited are not among them."""
    culprit_nodes: tuple[Name, ...] = ()
    """The nodes that caused it."""
    evidence: tuple[EvidenceItem, ...] = ()
    """What it rests on, the weightiest first."""
    alternatives: tuple[Alternative, ...] = ()
    """What else was considered."""
    missing: tuple[str, ...] = ()
    """Evidence that would have helped and was not there, with the reason."""
    advice: str = ""
    """`restart`, `restart_without` (the culprit nodes), `stop`, `wait` (until nodes or a quota are
    back) or `inform` (a person must act first); empty for none."""
    is_transient: bool | None = None
    """The same run may succeed next time; None when that is not known."""
    fingerprint: str = ""
    """A hash of the failure without its accidents: equal for the same bug."""
    analyzers: tuple[str, ...] = ()
    """The analyzers that contributed evidence."""
    revision: Count = 0
    """Grows when later evidence changes the verdict; the highest holds."""
    took_s: float = 0.0
    """From the incident's opening until now."""
    kind: Name = ""
    """What happened, finer than its class: `python_exception`, `never_joined`, `host_oom` …"""
    is_inconclusive: bool = False
    """No explanation is probable enough; the likeliest ones are among the alternatives."""
    is_corrected: bool = False
    """A person gave this verdict: it holds over all later evidence."""
    explanation: str = ""
    """The same in the words of a language model, where one is asked; it decides nothing."""


class VerdictCorrected(IncidentFact, frozen=True, kw_only=True, tag="verdict_corrected.v1"):
    """A person knows better who or what caused an incident; attribution sends it.

    The verdict that follows says the same, and holds over later evidence.
    """

    by: Name
    """The person, as authenticated."""
    cause: Name
    """The cause class that is right, as in `verdict_reached`."""
    note: str
    """Why, in their words."""
    culprit_ranks: tuple[Int, ...] = ()
    """The ranks that caused it."""
    culprit_nodes: tuple[Name, ...] = ()
    """The nodes that caused it."""
    verdict: Name | None = None
    """The id of the verdict that it corrects; None where there was none."""
    was_cause: Name = ""
    """The cause class of that verdict."""
    is_confirmation: bool = False
    """That verdict had said the same: a person has confirmed it."""
    origin: Name = ""
    """The interface: `rest` or `cli`."""


class Option(Part, frozen=True, kw_only=True):
    """An action that was considered and not taken."""

    action: Name
    """The action."""
    rejected: str
    """Why not, past which limit."""


class Budget(Part, frozen=True, kw_only=True):
    """What is left of a limit on actions."""

    name: str
    """`restarts`, `restarts_per_hour`, `no_progress`, `same_fingerprint`, `exclusions` …"""
    limit: Int
    """How many there may be."""
    left: Int
    """How many are left after this decision."""


CHECK_CONFIRMED = "checks.exclude"
"""The rule by which rendezvous has a node leave its job: a probe with the policy `exclude` fails on
the node, and passes on another. Health keeps such a node out of other jobs, too.
"""


class ActionDecided(Fact, frozen=True, kw_only=True, tag="action_decided.v1"):
    """An action that will be carried out, and why; the service that decides sends it first."""

    action: Name
    """`restart`, `wait`, `stop`, `exclude`, `shrink`, `grow`, `replace`, `save`, `end` …"""
    reason: str
    """Evidence and limits, in the words that an operator reads."""
    rule: str
    """The id of the rule that decided: `restart.budget_left`."""
    mode: Name = "enforce"
    """`enforce`, or `observe`: it is only recorded, not done."""
    incident: Name | None = None
    """The incident that it answers, if any."""
    evidence: tuple[str, ...] = ()
    """The ids of the facts that it rests on."""
    missing: tuple[str, ...] = ()
    """What was not known when it was decided."""
    considered: tuple[Option, ...] = ()
    """What else was possible."""
    budgets: tuple[Budget, ...] = ()
    """What is left."""
    nodes_out: tuple[Name, ...] = ()
    """Nodes that lose their slot by it."""
    nodes_in: tuple[Name, ...] = ()
    """Nodes that get one."""
    delay_s: float = 0.0
    """How long it waits first, for a crash loop's backoff."""
    took_s: float = 0.0
    """From the first report until this decision."""
    check: Name = ""
    """The check that it rests on, if it is about one."""


class ActionTaken(Fact, frozen=True, kw_only=True, tag="action_taken.v1"):
    """The outcome of a decision; the process that carried it out sends it."""

    decision: Name
    """The id of the `action_decided`."""
    action: Name
    """The action."""
    outcome: Name
    """`done`, `failed`, `observed` (only recorded) or `overtaken` (by a later round)."""
    reason: str
    """What happened."""
    incident: Name | None = None
    """The incident that it answers, if any."""
    took_s: float = 0.0
    """From the decision until now."""


class Ledger(Part, frozen=True, kw_only=True):
    """Where an incident's time went: the entries sum to its wall time."""

    detect_s: float = 0.0
    """From the last progress until the first report."""
    evidence_s: float = 0.0
    """Collecting evidence while the ranks still stood."""
    decide_s: float = 0.0
    """Until it was decided what to do, backoff included."""
    stop_s: float = 0.0
    """Until the last rank was gone and its accelerator free."""
    rendezvous_s: float = 0.0
    """Until the next round had formed."""
    start_s: float = 0.0
    """Until its last rank ran."""
    restore_s: float = 0.0
    """Until the state was back."""
    first_step_s: float = 0.0
    """Until the first step was finished."""
    other_s: float = 0.0
    """What belongs to none of these: the control plane was away."""

    @property
    def wall_s(self) -> float:
        """The sum."""
        return (
            self.detect_s
            + self.evidence_s
            + self.decide_s
            + self.stop_s
            + self.rendezvous_s
            + self.start_s
            + self.restore_s
            + self.first_step_s
            + self.other_s
        )


class IncidentClosed(IncidentFact, frozen=True, kw_only=True, tag="incident_closed.v1"):
    """The training is back, or will not come back; rendezvous sends it once."""

    outcome: Name
    """`recovered`, `stopped`, `failed`, `preempted` or `merged` (into `merged_into`)."""
    reason: str
    """The whole story in a sentence or two."""
    ledger: Ledger
    """Where the time went."""
    lost_steps: Count = 0
    """Steps that had to be made again."""
    lost_s: float = 0.0
    """The time that those steps had taken."""
    restored_step: Count | None = None
    """The step that the training went on from."""
    restored_tier: str = ""
    """The farthest tier that the restore read: `memory`, `disk`, `peer` or `global`."""
    next_round: Count | None = None
    """The round in which it recovered."""
    verdict: Name | None = None
    """The id of the verdict that holds."""
    reports: Int = 1
    """How many reports belonged to it."""
    merged_into: Name | None = None
    """The incident that took it over."""
    trigger: Name = ""
    """The kind of the report that explains the others best; the first one may not."""
    cause: Name = ""
    """What that report says."""
    trigger_fact: Name | None = None
    """Its id."""
    node: Name | None = None
    """The node that it is about."""
    rank: Count | None = None
    """The rank that it is about."""
