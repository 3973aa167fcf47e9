"""The permissions of each login: two logins of the control plane, and the agents of a job.

The control plane has an account of its own, with the streams and the services; each job has
another account. The subjects that an agent needs cross between the two by exports and imports;
the server returns each answer to the account of the client that asked.
"""

import re
from dataclasses import dataclass

from everstep import messages, subjects
from everstep.bus.topology import LIMITS, STRAGGLERS
from everstep.ids import checked_name
from everstep.messages import Fact, kind_of

ADMIN = "admin"
SERVICE = "service"
INBOXES = "_INBOX.>"
LOGINS = "logins"
"""The service that renews logins."""

AGENTS_ASK = {
    "rendezvous": ("join", "report", "leave", "drain", "restart", "stop"),
    "straggler": ("clock", "scores"),
    LOGINS: ("renew",),
}
"""The questions that the agents of a job may ask, by service."""

_FOLLOWED = (LIMITS, STRAGGLERS)
"""The buckets whose document about their job agents follow."""

AGENTS_RECORD: tuple[type[Fact], ...] = (
    messages.AllocationEnded,
    messages.AllocationStarted,
    messages.CheckpointCommitted,
    messages.CheckpointFailed,
    messages.CheckpointQuarantined,
    messages.CheckpointReleased,
    messages.CheckpointRestored,
    messages.EvidenceCollected,
    messages.FaultInjected,
    messages.FreshStarted,
    messages.IncidentClosed,
    messages.IncidentOpened,
    messages.IntervalChosen,
    messages.JobEnded,
    messages.JobStarted,
    messages.NetworkMeasured,
    messages.NodeCheckFinished,
    messages.NodeJoined,
    messages.NodeLeft,
    messages.NumericsActed,
    messages.NumericsCounted,
    messages.NumericsJudged,
    messages.NumericsSuspected,
    messages.OperatorActed,
    messages.PreemptionAcknowledged,
    messages.PreemptionMissed,
    messages.PreemptionNoticed,
    messages.PreemptionSaved,
    messages.ProgressMade,
    messages.RankExited,
    messages.RankRecovered,
    messages.RankStalled,
    messages.RankStarted,
    messages.RanksStopped,
    messages.ReplicaStored,
    messages.RestoreFailed,
    messages.RoundEnded,
    messages.RoundFormed,
    messages.RoundStarted,
    messages.SaveRefused,
    messages.SaveStarted,
    messages.SavesDelayed,
    messages.ShardsWritten,
    messages.StateHealed,
    messages.WatchChanged,
)
"""The facts that the agents of a job may record; only services record the others.

Some come from agents that are attached to the ranks of another launcher, where no service decides
about rounds.
"""

_DIRECT_GET = "$JS.API.DIRECT.GET"
_ABOUT_ACCOUNT = "$JS.API.INFO"


@dataclass(frozen=True, slots=True)
class User:
    """The subjects that one kind of login may publish and subscribe to."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Crossings:
    """Subjects that cross between two accounts.

    Messages to the services go to the exporting account, and so do questions with their answers;
    messages of the streams come from it.
    """

    services: tuple[str, ...]
    streams: tuple[str, ...]


EXPORTS = Crossings(
    services=(
        *(
            subjects.ask(service, verb, None)
            for service, verbs in AGENTS_ASK.items()
            for verb in verbs
        ),
        subjects.FACTS,
        subjects.BLOBS,
        subjects.LOGS,
        subjects.LOG_INDEXES,
        subjects.beat(),
        subjects.timing(),
        subjects.HEARD,
        *(f"{_DIRECT_GET}.KV_{bucket}.$KV.{bucket}.>" for bucket in _FOLLOWED),
        _ABOUT_ACCOUNT,
    ),
    streams=("es.order.>", *(subjects.document_news(bucket) for bucket in _FOLLOWED)),
)
"""The subjects that other accounts may import from the control plane, if the operator allows it."""


def admin() -> User:
    """Sets up streams and reads everything; for people and `everstep bus init`."""
    return User((">",), (">",))


def service() -> User:
    """For the services: all subjects of Everstep and JetStream, nothing else on a shared server."""
    return User(
        ("es.>", "$KV.>", "$JS.API.>", "$JS.ACK.>", "$SRV.>", INBOXES, "_R_.>"),
        ("es.>", "$SRV.>", INBOXES),
    )


def crossings(job: str) -> Crossings:
    """Return the imports of a job's account: the subjects of this job only."""
    job = checked_name("job", job)
    return Crossings(
        services=(
            *(
                subjects.ask(service, verb, job)
                for service, verbs in AGENTS_ASK.items()
                for verb in verbs
            ),
            *(subjects.fact(job, kind_of(fact)) for fact in AGENTS_RECORD),
            f"es.blob.{job}.*.*",
            subjects.log(job),
            subjects.log_index(job),
            subjects.beat(job),
            subjects.timing(job),
            subjects.heard(job),
            *(
                f"{_DIRECT_GET}.KV_{bucket}.{subjects.document(bucket, job)}"
                for bucket in _FOLLOWED
            ),
            _ABOUT_ACCOUNT,
        ),
        streams=(
            subjects.order(job),
            f"{subjects.order(job)}.>",
            *(subjects.document_news(bucket, job) for bucket in _FOLLOWED),
        ),
    )


def agent(job: str) -> User:
    """Return the permissions of a job's agents: the imported subjects, and answers of their own.

    They may only receive orders and documents, so that no agent can forge one for another.
    """
    crossing = crossings(job)
    return User(crossing.services, (*crossing.streams, INBOXES))


def agents_name(job: str) -> str:
    """The name of the login of a job's agents."""
    return f"agent-{checked_name('job', job)}"


def job_in(name: str) -> str | None:
    """The job whose agents have this login; None for a login of the control plane."""
    match = re.fullmatch(r"agent-(.+)", name)
    return match[1] if match else None


def login_name(role: str, job: str | None = None) -> str:
    """The name of a role's login; agents need their job."""
    if role in {ADMIN, SERVICE}:
        return role
    if role == "agent" and job is not None:
        return agents_name(job)
    raise ValueError(f"{role!r} is not a role: use {ADMIN}, {SERVICE}, or agent with a job")
