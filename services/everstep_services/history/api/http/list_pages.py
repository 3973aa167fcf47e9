"""Pages of lists: their parameters, and the query for a page."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field
from sqlalchemy import Select

from everstep.store.queries import Record, SortOrder, page
from everstep_services.history.api.context import Context
from everstep_services.history.api.http.parameters import LITERAL, RequestModel


class Paging(RequestModel):
    """How much of a list, and from where. Unknown parameters are refused."""

    limit: Annotated[int, Field(ge=1, le=1000), LITERAL] = 100
    """The most items of a page."""
    cursor: str | None = Field(None, max_length=1024)
    """`next` of the previous page, with the same filters."""

    def question(self, path: str) -> list[object]:
        """The question that a cursor belongs to: everything but the page."""
        return [path, self.model_dump(mode="json", exclude={"limit", "cursor"})]


@dataclass(frozen=True, slots=True)
class ListPage:
    """A page, and the cursor for the next one."""

    rows: Sequence[Record]
    next: str | None


async def paged(
    context: Context, query: Select[Any], order: SortOrder, asked: Paging, path: str
) -> ListPage:
    """The requested page of any list."""
    question = asked.question(path)
    after = None if asked.cursor is None else context.cursors.read(asked.cursor, question)
    rows_page = await page(context.database, query, order, after, asked.limit)
    key = rows_page.next_key
    return ListPage(rows_page.rows, None if key is None else context.cursors.make(key, question))
