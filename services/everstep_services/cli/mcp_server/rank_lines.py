"""Output of ranks for the tool `read_logs`: the log store, files on this machine, or the record."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from everstep.observe.redaction import redact
from everstep_services.cli.api.client import job_path
from everstep_services.cli.errors import CliError, Exit
from everstep_services.cli.mcp_server.answers import ToolAnswer
from everstep_services.cli.mcp_server.source import OpenSource, Source
from everstep_services.cli.pages.rank_logs import (
    STREAMS,
    LogLine,
    LogSelection,
    kept_lines,
    log_folder,
    past_lines,
    rank_files,
)

_NO_STORE = frozenset({Exit.NOT_FOUND, Exit.UNREACHABLE})


def read_lines(
    server: Source, source: OpenSource, job: str, asked: Mapping[str, Any], limit: int
) -> ToolAnswer:
    """The lines that are wanted, from the first place that has any."""
    problem: CliError | None = None
    try:
        return source.page(f"Lines of {job} from the log store", f"{job_path(job)}/logs", asked,
                           limit)  # fmt: skip
    except CliError as error:
        if error.code not in _NO_STORE or asked["cursor"] or asked["since"]:
            raise
        problem = error
    wanted = _selection(job, asked, limit)
    files = rank_files(log_folder(server.invocation, None), wanted) if server.is_own else []
    if files:
        lines = past_lines(files, None if asked["contains"] else limit)
        return _answer(f"The last lines of {job} from files on this machine", lines, asked, limit)
    try:
        notes = list(source.notes)
        kept = list(kept_lines(source.api, wanted, notes.append))
        title = f"The ends of the logs of ranks of {job} that failed, from the record"
        return _answer(title, kept, asked, limit, notes)
    except CliError as error:
        text = f"there is no output of {job}: {problem}; {error}"
        raise CliError(text, error.code) from error


def _answer(
    title: str,
    lines: Iterable[LogLine],
    asked: Mapping[str, Any],
    limit: int,
    notes: Iterable[str] = (),
) -> ToolAnswer:
    items = list(islice(_masked(lines, asked["contains"]), limit + 1))
    is_cut = len(items) > limit
    more = ["There are more lines: name a rank, a stream or a text."] if is_cut else []
    data = {"items": items[:limit]}
    return ToolAnswer(f"{title}: {len(data['items'])} lines.", data, [*notes, *more])


def _masked(lines: Iterable[LogLine], contains: str | None) -> Iterator[dict[str, Any]]:
    """As REST gives them: without secrets."""
    for line in lines:
        if contains is None or contains in line.text:
            yield {**line._asdict(), "text": redact(line.text.rpartition("\r")[2])}


def _selection(job: str, asked: Mapping[str, Any], limit: int) -> LogSelection:
    ranks = tuple(int(rank) for rank in asked["rank"] or ())
    node = asked["node"][0] if asked["node"] else None
    streams = (asked["stream"],) if asked["stream"] else STREAMS
    return LogSelection(job, asked["round"], ranks, node, streams, limit)
