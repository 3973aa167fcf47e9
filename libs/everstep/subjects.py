"""Names on the bus, built by functions; the second token says how a message travels."""

import re

from everstep.errors import EverstepError

FACTS = "es.fact.>"
BLOBS = "es.blob.>"
HEARD = "es.heard.>"
LOGS = "es.log.>"
LOG_INDEXES = "es.logindex.>"
CLUSTER = "_cluster"
"""Stands in place of a job in what belongs to no job; no job can have this name."""

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,128}")


class BadSubjectError(EverstepError):
    """A name would change the shape of a subject, or match other jobs."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name!r} cannot be part of a subject: use 1 to 128 letters, digits, '_' and "
            f"'-' (a '.' would add a level, a '*' or '>' would match other jobs)"
        )
        self.name = name


def beat(job: str | None = None, node: str | None = None) -> str:
    """One node's beats; without a node or a job, the wildcard for all of them."""
    return f"es.beat.{_token(job)}.{_token(node)}"


def timing(job: str | None = None, node: str | None = None) -> str:
    """One node's section timings; without a node or a job, the wildcard."""
    return f"es.timing.{_token(job)}.{_token(node)}"


def fact(job: str | None, kind: str | None = None) -> str:
    """Facts of one kind about one job; without either, the wildcard."""
    return f"es.fact.{_token(job)}.{_token(kind)}"


def order(job: str, node: str | None = None) -> str:
    """Orders to all agents of a job, or to one of them."""
    return f"es.order.{_token(job)}" + ("" if node is None else f".{_token(node)}")


def injection(job: str, instance: str) -> str:
    """Faults for one agent to inject; heard only where they are allowed."""
    return f"es.order.{_token(job)}.{_token(instance)}.inject"


def hail(job: str | None, node: str | None) -> str:
    """Where a node that is silent is asked for a beat; without a node or a job, the wildcard."""
    return f"es.order.{_token(job)}.{_token(node)}.hail"


def heard(job: str, inbox: str | None = None, token: str | None = None) -> str:
    """Where agents of a job acknowledge an order; without an inbox, the wildcard."""
    return f"es.heard.{_token(job)}.{_token(inbox)}.{_token(token)}"


def heard_by(inbox: str) -> str:
    """Where the sender of orders hears who has acknowledged them."""
    return f"es.heard.*.{_token(inbox)}.*"


def lost(job: str | None = None, node: str | None = None) -> str:
    """Where health tells what rendezvous needs: that a node is lost, that a stall began there.

    Without a node or a job, the wildcard.
    """
    return f"es.lost.{_token(job)}.{_token(node)}"


def ask(service: str, verb: str, job: str | None) -> str:
    """A question to a service on behalf of one job; without a job, what the service hears.

    The job is part of the subject so that the server itself can keep one job's agents
    from asking in the name of another's.
    """
    return f"es.ask.{_token(service)}.{_token(verb)}.{_token(job)}"


def document(bucket: str, key: str) -> str:
    """Where a stored document is kept."""
    return f"$KV.{_token(bucket)}.{_key(key)}"


def document_news(bucket: str, key: str | None = None) -> str:
    """Where each new revision of a document is announced; without a key, of all of them."""
    return f"es.doc.{_token(bucket)}.{'>' if key is None else _key(key)}"


def blob(job: str, blob_id: str, part: int | None = None) -> str:
    """One part of a blob; without a part, all of them."""
    return f"es.blob.{_token(job)}.{_token(blob_id)}.{'*' if part is None else part}"


def log(
    job: str,
    round: int | None = None,
    node: str | None = None,
    rank: int | None = None,
    stream: str | None = None,
) -> str:
    """Pieces of the output of a rank; without a round, a node, a rank or a stream, of all."""
    number, which = ("*" if value is None else str(value) for value in (round, rank))
    return f"es.log.{_token(job)}.{number}.{_token(node)}.{which}.{_token(stream)}"


def log_index(job: str, round: int | None = None, node: str | None = None) -> str:
    """What a node has sent of the output of a round; without a round or a node, of all."""
    number = "*" if round is None else str(round)
    return f"es.logindex.{_token(job)}.{number}.{_token(node)}"


def job_of(subject: str) -> str:
    """The job that a fact, beat, timing, order, acknowledgement, blob, log or question is about."""
    tokens = subject.split(".")
    return tokens[4] if tokens[1] == "ask" else tokens[2]


def is_name(name: str) -> bool:
    """Whether the text can be the name of a job or a node."""
    return _TOKEN.fullmatch(name) is not None


def check_name(name: str) -> None:
    """Raise `BadSubjectError` unless the text can be the name of a job or a node."""
    _token(name)


def is_key(key: str) -> bool:
    """Whether a document may have this key; other programs may store what they like."""
    return all(_TOKEN.fullmatch(part) for part in key.split("."))


def _key(key: str) -> str:
    return ".".join(_token(part) for part in key.split("."))


def _token(name: str | None) -> str:
    if name is None:
        return "*"
    if not _TOKEN.fullmatch(name):
        raise BadSubjectError(name)
    return name
