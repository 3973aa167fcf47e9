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
    """The first sign of trouble; rendezvous sends this with the report that ended the round."""

    trigger: Name
    """The kind of the first report: `rank_exited`, `rank_stalled`, `node_lost`,
    `restarted_in_process`, `numerics` …"""
    reason: str
    """What happened, to which rank or node, and which limit was passed."""
    trigger_fact: Name | None = None
    """The id of the first report."""
    node: Name | None = None
    """The node that the first report is about."""
    rank: Count | None = None
    """The rank that the first report is about."""
    step: Count | None = None
    """The last step that the training finished."""
    phase: Name = ""
    """Where the training was: `start`, `first_step`, `step`, `checkpoint`, `restore` …"""
    section: Name | None = None
    """The section in which that rank was."""
    last_progress_at: Time | None = None
    """The time of the training's last progress: the ledger counts from here."""
    injected_by: Name = ""
    """Who made the fault on purpose, where `reason` names them."""
    error_name: str = ""
    """For `restarted_in_process`: the class of the exception that the rank raised; empty for none.
    """


class IncidentExtended(IncidentFact, frozen=True, kw_only=True, tag="incident_extended.v1"):
    """Further reports belong to an open incident.

    Rendezvous sends this once a second at most, so that a thousand reports become a few facts.
    """

    reports: tuple[str, ...]
    """The ids of the reports, at most 100."""
    nodes: tuple[Name, ...] = ()
    """The nodes that the reports are about, at most 100."""
    ranks: Count = 0
    """How many ranks are affected so far."""
    reason: str = ""
    """What the reports mean together."""
    lost: tuple[Name, ...] = ()
    """The nodes that were lost together, so far."""


class EvidenceCollected(IncidentFact, frozen=True, kw_only=True, tag="evidence_collected.v1"):
    """A piece of evidence, or why there is none; the node's agent sends this for each piece.

    The evidence of a capture belongs to no incident: `incident` is then `capture-` and the
    capture's id.
    """

    node: Name
    """The node that the evidence comes from."""
    evidence: Name
    """`exception`, `log`, `flight_recorder`, `split_sizes` (dumps with the sizes of an all_to_all),
    `nccl_ras`, `stacks`, `kernel_log`, `gpu`, `cgroup`, `environment`, `page`, `process` (the
    kernel's view of the ranks that still lived) or `check`. The blob of `flight_recorder`, of
    `split_sizes` and of `stacks` is an archive with a file for each rank."""
    rank: Count | None = None
    """The rank that the evidence is about; None for the whole node."""
    blob: BlobRef | None = None
    """Where the evidence is stored; None when there is none."""
    summary: str = ""
    """The content in a line, where the agent can tell."""
    missing: str = ""
    """Why there is no evidence: `not armed`, `the rank had exited`, `timed out after 5 s` …"""
    took_s: float = 0.0
    """How long it took to collect."""

    @property
    def is_of_capture(self) -> bool:
        """A person requested it: it belongs to no incident."""
        return is_capture(self.incident)


class EvidenceItem(Part, frozen=True, kw_only=True):
    """A piece of evidence that a verdict rests on."""

    says: str
    """The finding, in words: `rank 7 never entered all_reduce 1204`."""
    analyzer: str = ""
    """The analyzer that made the finding: `flight_recorder`, `nccl_ras`, `stacks`, `logs`,
    `health`, `history`."""
    fact: str | None = None
    """The fact that the finding comes from."""
    blob: BlobRef | None = None
    """The blob that the finding comes from."""
    weight: float = 0.0
    """How much the finding counts, 0 to 1; below 0 when it speaks against the verdict."""


class Alternative(Part, frozen=True, kw_only=True):
    """Another explanation, and why it was not chosen."""

    cause: Name
    """The cause class of this explanation."""
    confidence: float
    """0 to 1."""
    reason: str
    """What speaks for this explanation, and what against it."""
    ranks: tuple[Int, ...] = ()
    """The ranks that this explanation would blame."""
    nodes: tuple[Name, ...] = ()
    """The nodes that this explanation would blame."""


class VerdictReached(IncidentFact, frozen=True, kw_only=True, tag="verdict_reached.v1"):
    """Who caused an incident, and what kind of failure it is.

    Attribution sends this, and sends it again when later evidence changes the verdict. A
    verdict is advice: no restart waits for it.
    """

    cause: Name
    """The cause class: `user_code`, `configuration`, `data`, `framework`, `gpu`, `host`, `network`,
    `storage`, `scheduler`, `injected` or `unknown`."""
    confidence: float
    """0 to 1."""
    reason: str
    """The explanation, in the words that a person reads first."""
    culprit_ranks: tuple[Int, ...] = ()
    """The ranks that caused the incident, without those that merely waited."""
    culprit_nodes: tuple[Name, ...] = ()
    """The nodes that caused the incident."""
    evidence: tuple[EvidenceItem, ...] = ()
    """The findings that the verdict rests on, the weightiest first."""
    alternatives: tuple[Alternative, ...] = ()
    """The other explanations that were considered."""
    missing: tuple[str, ...] = ()
    """Evidence that would have helped but is not there, with the reason."""
    advice: str = ""
    """`restart`, `restart_without` (the culprit nodes), `restart_elsewhere` (on other nodes),
    `change` (something first), `stop`, `wait` (until nodes or a quota are back) or `inform` (a
    person must act first); empty for none."""
    is_transient: bool | None = None
    """The same training may succeed next time; None when that is not known."""
    retry: str = ""
    """Whether another attempt may succeed: `as_is`, `without_node` (the culprit nodes),
    `after_change` (of something by somebody), `never` (somebody requested the end) or `unknown`;
    empty in facts of older releases."""
    fingerprint: str = ""
    """A hash of the failure without its accidental details: equal for the same bug."""
    analyzers: tuple[str, ...] = ()
    """The analyzers that contributed evidence."""
    revision: Count = 0
    """A number that grows when later evidence changes the verdict; the highest one holds."""
    took_s: float = 0.0
    """The time since the incident opened."""
    kind: Name = ""
    """What happened, finer than the cause class: `python_exception`, `never_joined`, `host_oom`
    …"""
    is_inconclusive: bool = False
    """No explanation is probable enough; the likeliest ones are among the alternatives."""
    is_corrected: bool = False
    """A person gave this verdict: it holds over all later evidence."""
    explanation: str = ""
    """The verdict in the words of a language model, where one is configured; the text decides
    nothing."""


class VerdictCorrected(IncidentFact, frozen=True, kw_only=True, tag="verdict_corrected.v1"):
    """A person knows better who or what caused an incident; attribution sends this.

    The verdict that follows has the same cause, and holds over later evidence.
    """

    by: Name
    """The person, as authenticated."""
    cause: Name
    """The cause class that is right, as in `verdict_reached`."""
    note: str
    """Why, in the person's words."""
    culprit_ranks: tuple[Int, ...] = ()
    """The ranks that caused the incident."""
    culprit_nodes: tuple[Name, ...] = ()
    """The nodes that caused the incident."""
    verdict: Name | None = None
    """The id of the corrected verdict; None where there was none."""
    was_cause: Name = ""
    """The cause class of the corrected verdict."""
    is_confirmation: bool = False
    """The earlier verdict had the same cause: the person has confirmed it."""
    origin: Name = ""
    """The interface: `rest` or `cli`."""


class Option(Part, frozen=True, kw_only=True):
    """An action that was considered and not taken."""

    action: Name
    """The action."""
    rejected: str
    """Why the action was not taken, and which limit forbids it."""


class Budget(Part, frozen=True, kw_only=True):
    """The rest of a limit on actions."""

    name: str
    """`restarts`, `restarts_per_hour`, `no_progress`, `same_fingerprint`, `exclusions` …"""
    limit: Int
    """How many actions the limit allows."""
    left: Int
    """How many actions are left after this decision."""


CHECK_CONFIRMED = "checks.exclude"
"""The rule by which rendezvous has a node leave its job: a probe with the policy `exclude` fails on
the node, and passes on another. Health keeps such a node out of other jobs, too.
"""


class ActionDecided(Fact, frozen=True, kw_only=True, tag="action_decided.v1"):
    """An action that will be carried out, and why; the deciding service sends this first."""

    action: Name
    """`restart`, `wait`, `stop`, `exclude`, `shrink`, `grow`, `replace`, `save`, `end` …"""
    reason: str
    """Evidence and limits, in the words that an operator reads."""
    rule: str
    """The id of the rule that led to the decision: `restart.budget_left`."""
    mode: Name = "enforce"
    """`enforce`, or `observe`: the decision is only recorded, not carried out."""
    incident: Name | None = None
    """The incident that the action answers, if any."""
    evidence: tuple[str, ...] = ()
    """The ids of the facts that the decision rests on."""
    missing: tuple[str, ...] = ()
    """What was not known at the time of the decision."""
    considered: tuple[Option, ...] = ()
    """The other actions that were possible."""
    budgets: tuple[Budget, ...] = ()
    """The rest of each limit."""
    nodes_out: tuple[Name, ...] = ()
    """The nodes that lose their slot by the action."""
    nodes_in: tuple[Name, ...] = ()
    """The nodes that get a slot by the action."""
    delay_s: float = 0.0
    """How long the action waits first, so that a job that always fails does not restart at once."""
    took_s: float = 0.0
    """The time from the first report until this decision."""
    check: Name = ""
    """The check that the decision rests on, if it is about a check."""


class ActionTaken(Fact, frozen=True, kw_only=True, tag="action_taken.v1"):
    """The outcome of a decision; the process that carried it out sends this."""

    decision: Name
    """The id of the `action_decided`."""
    action: Name
    """The action."""
    outcome: Name
    """`done`, `failed`, `observed` (only recorded) or `overtaken` (by a later round)."""
    reason: str
    """What happened."""
    incident: Name | None = None
    """The incident that the action answers, if any."""
    took_s: float = 0.0
    """The time since the decision."""


class Ledger(Part, frozen=True, kw_only=True):
    """Where an incident's time went: the entries sum to its wall time."""

    unfinished_s: float = 0.0
    """The time from the last progress until a rank ended: the step that its end has cut off."""
    detect_s: float = 0.0
    """From there, or from the last progress where no rank has ended, until the first report."""
    evidence_s: float = 0.0
    """The time in which evidence was collected while the ranks still stood."""
    decide_s: float = 0.0
    """From there until the decision, with the wait before a restart."""
    stop_s: float = 0.0
    """From there until the last rank was gone and its accelerator free."""
    rendezvous_s: float = 0.0
    """From there until the next round had formed."""
    start_s: float = 0.0
    """From there until the last rank of that round ran."""
    restore_s: float = 0.0
    """From there until the state was restored."""
    heal_s: float = 0.0
    """From there until all ranks had their states, where some had kept theirs in their memory."""
    first_step_s: float = 0.0
    """From there until the first step was finished; where no step was seen, until the first
    collective began."""
    no_step_s: float = 0.0
    """From when all ranks of a later round ran until it ended without a step that was seen."""
    other_s: float = 0.0
    """Time that belongs to none of the others, as when the control plane was away."""

    @property
    def wall_s(self) -> float:
        """The sum."""
        return (
            self.unfinished_s
            + self.detect_s
            + self.evidence_s
            + self.decide_s
            + self.stop_s
            + self.rendezvous_s
            + self.start_s
            + self.restore_s
            + self.heal_s
            + self.first_step_s
            + self.no_step_s
            + self.other_s
        )


class IncidentClosed(IncidentFact, frozen=True, kw_only=True, tag="incident_closed.v1"):
    """The training is back, or will not come back; rendezvous sends this once."""

    outcome: Name
    """`recovered`, `stopped`, `failed`, `preempted` or `merged` (into `merged_into`)."""
    reason: str
    """The whole story in a sentence or two."""
    ledger: Ledger
    """Where the time went."""
    lost_steps: Count | None = None
    """Steps that had to be made again; None if that is not known, because the script does not
    number its steps, or shows none, or because the training did not go on in this launch."""
    lost_s: float = 0.0
    """The time that those steps had taken."""
    restored_step: Count | None = None
    """The step from which the training continued."""
    restored_tier: str = ""
    """The farthest tier from which a rank restored: `memory`, `disk`, `peer` or `global`."""
    next_round: Count | None = None
    """The round in which the training recovered."""
    verdict: Name | None = None
    """The id of the verdict that holds."""
    reports: Int = 1
    """How many reports belonged to the incident."""
    merged_into: Name | None = None
    """The incident that took over this one."""
    trigger: Name = ""
    """The kind of the report that explains the others best; the first report may not."""
    cause: Name = ""
    """The text of that report."""
    trigger_fact: Name | None = None
    """The id of that report."""
    node: Name | None = None
    """The node that that report is about."""
    rank: Count | None = None
    """The rank that that report is about."""
    injected_by: Name = ""
    """Who made that fault on purpose, where `cause` names them."""
