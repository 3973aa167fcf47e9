"""Forwards requests of people to the service that carries them out, and logs who asked."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import select

from everstep.bus.errors import BusDeniedError
from everstep.store import tables
from everstep.store.queries import SortOrder, is_begun, page
from everstep.store.tokens import Token
from everstep.subjects import CLUSTER
from everstep_services.history.api.context import Context
from everstep_services.history.api.dto.operators import Decided, RequestBody
from everstep_services.history.api.http.problems import ProblemError, not_found
from everstep_services.history.node_names import jobs_of_node
from everstep_services.history.operator_requests import (
    NoSuchJobError,
    OperatorRequest,
    RequestError,
    RequestRefusedError,
    ServiceUnavailableError,
    Verb,
    carry_out,
    did_you_mean,
    similar_names,
)

log = logging.getLogger(__name__)

_NAMES_MOST = 1000


async def do(
    context: Context,
    by: Token,
    verb: Verb,
    job: str | None,
    wanted: RequestBody,
    *,
    node: str | None = None,
    **more: str | float,
) -> Decided:
    """Forward a request. Without a job it is about all jobs; `more` has the names in the path."""
    who = asker(by, wanted)
    details = wanted.details() | more | ({} if node is None else {"node": node})
    deed = OperatorRequest(verb, job or CLUSTER, who, wanted.reason, "rest", details)
    about = node or job or "the cluster"
    try:
        text = await carry_out(context.bus, deed)
    except NoSuchJobError as error:
        raise not_found(f"job {job}{similar_names(error.job, await _names(context))}") from error
    except RequestRefusedError as error:
        raise ProblemError(409, "refused", f"{verb} of {about} refused: {error}") from error
    except (ServiceUnavailableError, BusDeniedError) as error:
        raise unavailable(deed.service, error) from error
    log.info("operator_asked action=%s about=%s by=%r token=%s", verb, about, who, by.id)
    return Decided(job=job, action=verb, node=node, by=who, text=text)


@contextmanager
def problems_of(service: str, refused: tuple[int, str] | None = None) -> Iterator[None]:
    """Make problems of the errors of a question; `refused` has status and code of a refusal."""
    try:
        yield
    except (RequestError, BusDeniedError) as error:
        if refused is not None and isinstance(error, RequestRefusedError):
            raise ProblemError(*refused, str(error)) from error
        raise unavailable(service, error) from error


def asker(by: Token, wanted: RequestBody) -> str:
    """The name of the person for the record."""
    return by.name if wanted.user is None else f"{wanted.user} ({by.name})"


def unavailable(service: str, why: object) -> ProblemError:
    """The problem of a service that cannot be reached now."""
    later = {"Retry-After": "5"}
    return ProblemError(503, f"{service}_unavailable", str(why), headers=later)


async def job_of(context: Context, node: str) -> str:
    """The only job that this node takes part in, according to the record."""
    names = await jobs_of_node(context.database, node)
    if not names:
        raise not_found(f"job that node {node} takes part in")
    if len(names) > 1:
        detail = f"{node} takes part in {', '.join(names[:10])}: name the `job`"
        raise ProblemError(409, "several_jobs", detail)
    return names[0]


async def no_such_job(context: Context, job: str) -> ProblemError:
    """The problem of a job that is not on record, with the names that are close to it."""
    return not_found(f"job {job}{did_you_mean(job, await _names(context))}")


async def _names(context: Context) -> list[str]:
    jobs = tables.jobs.c
    newest = SortOrder((jobs.first_n,), is_descending=True)
    query = select(jobs.job, jobs.first_n).where(is_begun())
    listing = await page(context.database, query, newest, None, _NAMES_MOST)
    return [str(row["job"]) for row in listing.rows]
