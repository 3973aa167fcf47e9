"""`/jobs/{job}/numerics`: results that cannot be right, and how far results are deterministic."""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import Field
from sqlalchemy import Select, Table, select

from everstep.store import tables
from everstep.store.incident_story import numerics_acts
from everstep.store.queries import SortOrder
from everstep_services.history.api.context import Ctx, Reader
from everstep_services.history.api.dto.answer import PageOf, present
from everstep_services.history.api.dto.numerics import DeterminismOut, NumericsCase, shown_case
from everstep_services.history.api.endpoints.jobs import check_known
from everstep_services.history.api.http.list_pages import Paging, paged
from everstep_services.history.api.http.parameters import JobName, Whole
from everstep_services.history.api.http.problems import responses

router = APIRouter(tags=["numerics"])

NumericsKind = Literal[
    "transient", "persistent", "correct_but_unexpected", "not_reproducible_and_not_local",
    "replica_differs",
]  # fmt: skip


class NumericsFilter(Paging):
    """Filters of compared results."""

    round: Whole | None = Field(None, description="Only in this round.")


class CaseFilter(NumericsFilter):
    """Filters of cases."""

    kind: list[NumericsKind] | None = Field(
        None, max_length=10, description="Only with one of these judgements."
    )
    order: Literal["asc", "desc"] = Field(
        "desc", description="The order of their places in the log."
    )


@router.get(
    "/jobs/{job}/numerics", summary="A job's results that cannot be right", responses=responses(404)
)
async def list_numerics(
    context: Ctx, _token: Reader, job: JobName, asked: Annotated[CaseFilter, Query()]
) -> PageOf[NumericsCase]:
    """Each unexpected result: suspected, judged, and what followed; newest first."""
    await check_known(context, job)
    columns = tables.numerics_cases.c
    query = _of_job(tables.numerics_cases, job, asked)
    if asked.kind:
        query = query.where(columns.kind.in_(asked.kind))
    order = SortOrder((columns.first_n,), is_descending=asked.order == "desc")
    rows = await paged(context, query, order, asked, f"/jobs/{job}/numerics")
    async with context.database.read() as connection:
        acts = await numerics_acts(connection, job, [row["case"] for row in rows.rows])
    cases = [shown_case(row, [act for act in acts if act["case"] == row["case"]])
             for row in rows.rows]  # fmt: skip
    return PageOf[NumericsCase](items=cases, next=rows.next)


@router.get(
    "/jobs/{job}/numerics/determinism",
    summary="How far results are deterministic",
    responses=responses(404),
)
async def list_determinism(
    context: Ctx, _token: Reader, job: JobName, asked: Annotated[NumericsFilter, Query()]
) -> PageOf[DeterminismOut]:
    """Which results differ when a step is run again, and by how much; the newest round first."""
    await check_known(context, job)
    columns = tables.compared_results.c
    query = _of_job(tables.compared_results, job, asked)
    order = SortOrder((columns.round, columns.name), is_descending=True)
    rows = await paged(context, query, order, asked, f"/jobs/{job}/numerics/determinism")
    items = [DeterminismOut(**present(row)) for row in rows.rows]
    return PageOf[DeterminismOut](items=items, next=rows.next)


def _of_job(table: Table, job: str, asked: NumericsFilter) -> Select[Any]:
    """The rows of a job, or of one of its rounds."""
    query = select(table).where(table.c.job == job)
    return query if asked.round is None else query.where(table.c.round == asked.round)
