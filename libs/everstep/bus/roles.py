"""Who may say and hear what on the bus. The server enforces it, job by job."""

import re
import secrets
from dataclasses import dataclass

from everstep import subjects
from everstep.bus.topology import CONTROL, EVIDENCE_STREAM, LIMITS, ROUNDS
from everstep.ids import checked_name

ADMIN = "admin"
SERVICE = "service"


@dataclass(frozen=True, slots=True)
class User:
    """One login. Its name is `admin`, `service`, or `agent-<job>`."""

    name: str
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]


def admin() -> User:
    """Sets up streams and reads everything; for people and `everstep bus init`."""
    return User(ADMIN, (">",), (">",))


def service() -> User:
    """The control plane: all of ours, JetStream, and nothing else on a shared server."""
    return User(
        SERVICE,
        ("es.>", "$KV.>", "$JS.API.>", "$JS.ACK.>", "$SRV.>", "_INBOX.>", "_R_.>"),
        ("es.>", "$SRV.>", f"_INBOX.{SERVICE}.>"),
    )


def agent(job: str) -> User:
    """The agents of one job: its own subjects, its own documents, and no other job's.

    They ask JetStream only for single documents by name: no consumers, no lists.
    """
    job = checked_name("job", job)
    name = f"agent-{job}"
    documents = [f"{ROUNDS}.$KV.{ROUNDS}.{job}", f"{LIMITS}.$KV.{LIMITS}.{job}"]
    direct_get = "$JS.API.DIRECT.GET"
    return User(
        name,
        (
            subjects.beat(job),
            subjects.timing(job),
            subjects.fact(job),
            f"es.blob.{job}.>",
            f"es.ask.*.*.{job}",
            *(f"{direct_get}.KV_{key}" for key in documents),
            *(f"{direct_get}.KV_{key}.>" for key in documents),
            f"{direct_get}.KV_{CONTROL}.$KV.{CONTROL}.>",
            f"{direct_get}.{EVIDENCE_STREAM}.es.blob.{job}.>",
            "$JS.API.INFO",
        ),
        (
            subjects.order(job),
            f"{subjects.order(job)}.>",
            subjects.document_news(ROUNDS, job),
            f"{subjects.document_news(ROUNDS, job)}.>",
            subjects.document_news(LIMITS, job),
            f"{subjects.document_news(LIMITS, job)}.>",
            subjects.document_news(CONTROL),
            f"_INBOX.{name}.>",
        ),
    )


def user_for(role: str, job: str | None = None) -> User:
    """The user of a role; agents need their job."""
    if role == ADMIN:
        return admin()
    if role == SERVICE:
        return service()
    if role == "agent" and job is not None:
        return agent(job)
    raise ValueError(f"{role!r} is no role: use {ADMIN}, {SERVICE}, or agent with a job")


def by_name(name: str) -> User:
    """The user with this login."""
    found = re.fullmatch(r"agent-(.+)", name)
    return user_for("agent", found[1]) if found else user_for(name)


def new_password() -> str:
    """256 random bits: no dictionary has it, so the server needs no slow hash."""
    return secrets.token_urlsafe(32)
