"""The document in `NOTICES`: which notifications are open, and which target has which of them."""

from everstep.messages.base import Count, DocumentBody, Int, Name, Part, Time


class TargetState(Part, frozen=True, kw_only=True):
    """How far one target is informed about one notice."""

    target: Name
    """`webhook`, `slack`, `pagerduty` or `alertmanager`."""
    state: Name
    """`firing`, `resolved`, or `given_up`: the target has refused the notice for good."""
    cause: Name = ""
    """The last cause in a message to the target."""
    updates: Count = 0
    """How many messages to the target had another cause than the one before."""


class Notice(Part, frozen=True, kw_only=True):
    """An event that people should know, until every target has been informed about all of it."""

    id: str
    """The id, the same for the same event, whichever replica sends the notice."""
    event: Name
    """`incident`, `job_failed`, `job_stopped`, `slow_rank`, `node_drained`, `node_excluded` or
    `breaker_open`."""
    state: Name
    """`unheard` (its first fact has not arrived yet), `held`, `firing` or `resolved`."""
    heard_s: float
    """When the sender read the first fact: seconds since 1970."""
    job: Name
    """The job, or `_cluster`."""
    subject: Name = ""
    """The incident, the node or the finding that the notice is about."""
    began_at: Time | None = None
    """When the event began, by its first fact."""
    ended_at: Time | None = None
    """When the event was over, by its last fact."""
    reason: str = ""
    """What happened."""
    ending: str = ""
    """How the event ended, in words."""
    outcome: Name = ""
    """How it ended: `recovered`, `repeated`, `failed`, `included` …; empty while it lasts."""
    cause: Name = ""
    """The cause of the verdict that holds; for a slow rank, why it is slow."""
    verdict: str = ""
    """The text of the verdict."""
    is_inconclusive: bool = False
    """The verdict names no cause: the first report comes first."""
    revision: Int = -1
    """The revision of the verdict; -1 without one."""
    confidence: float | None = None
    """The confidence of the verdict, 0 to 1."""
    ranks: tuple[Int, ...] = ()
    """The ranks that caused the event, at most 16."""
    nodes: tuple[Name, ...] = ()
    """The nodes that caused the event, at most 16."""
    affected: Count = 0
    """How many ranks are affected."""
    round: Count | None = None
    """The round of a slow rank."""
    next_round: Count | None = None
    """The round that brought the training back after an incident."""
    fingerprint: str = ""
    """The fingerprint of the verdict."""
    action: str = ""
    """What was done about it."""
    lost_s: float | None = None
    """The time that the job lost by the event."""
    lost_steps: Count | None = None
    """The steps that had to be made again."""
    cost_ratio: float | None = None
    """What a slow rank costs its job: 0.12 for 12 %."""
    incident: Name = ""
    """The incident that ended a job."""
    has_incident: bool = False
    """It is the message about that incident, too: a later verdict on the incident changes it."""
    more: Count = 0
    """How many other notices of the same kind this notice stands for."""
    more_since_s: float | None = None
    """When the first of these was heard: seconds since 1970."""
    targets: tuple[TargetState, ...] = ()
    """How far each target is informed."""


class ToldGroup(Part, frozen=True, kw_only=True):
    """Similar notices, as those of a job's incidents with one cause, and when one was sent last."""

    group: str
    """Event, job and cause."""
    sent_s: float
    """Seconds since 1970."""


class FailingTarget(Part, frozen=True, kw_only=True):
    """A target whose every attempt has failed for some time."""

    target: Name
    """`webhook`, `slack`, `pagerduty` or `alertmanager`."""
    since_s: float
    """When the first of these attempts failed: seconds since 1970."""


class NoticesDocument(DocumentBody, frozen=True, kw_only=True, tag="notices_document.v1"):
    """Open notifications, and the position up to which facts were read; history writes it.

    Key: `_cluster`. The replica that sends notices writes the document before and after it
    sends.
    """

    stream: str = ""
    """The incarnation of the stream of facts."""
    sequence: Count = 0
    """The last fact that was read."""
    began_s: float = 0.0
    """When notifications were switched on: nothing is sent about earlier events."""
    notices: tuple[Notice, ...] = ()
    """The open notices, in the order of their first facts; at most 500."""
    told: tuple[ToldGroup, ...] = ()
    """Groups whose cooldown may not be over."""
    finished: tuple[str, ...] = ()
    """Short hashes of the newest notices and facts that need no further work, at most 2,000."""
    stopped: tuple[Name, ...] = ()
    """Jobs that a person has asked to stop, at most 200."""
    failing: tuple[FailingTarget, ...] = ()
    """Targets that fail now."""
