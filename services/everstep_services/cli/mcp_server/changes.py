"""The tools that change something. They exist only with `--allow-changes`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field

from everstep.subjects import CLUSTER
from everstep_services.cli.mcp_server import parameters as p
from everstep_services.cli.mcp_server.answers import ToolAnswer
from everstep_services.cli.mcp_server.source import Source
from everstep_services.cli.operator_requests import CheckpointRequest, CommandRequest, quoted

_YEAR_H = 366 * 24


class ChangeTools:
    """One method for each tool. REST checks the token's scope, and records who asked."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def all(self) -> tuple[Callable[..., ToolAnswer], ...]:
        """The tools, in the order in which clients list them."""
        return (
            *(self.exclude_node, self.include_node, self.drain_node),
            *(self.pin_checkpoint, self.unpin_checkpoint),
        )

    def exclude_node(
        self,
        node: p.Node,
        reason: p.Reason,
        hours: Annotated[
            float | None,
            Field(gt=0, le=_YEAR_H, description="How long; null for the time health is set to."),
        ] = None,
    ) -> ToolAnswer:
        """Let a node join no job for a time. A round that runs on it goes on."""
        with self._source.open() as source:
            source.api.get(f"nodes/{quoted(node)}")  # a misread name must not be excluded
        details = {"ttl_s": None if hours is None else hours * 3600}
        return self._ask(CommandRequest("exclude", reason, CLUSTER, node=node, details=details))

    def include_node(self, node: p.Node, reason: p.Reason) -> ToolAnswer:
        """Let a node join again, no matter who excluded it."""
        return self._ask(CommandRequest("include", reason, CLUSTER, node=node))

    def drain_node(
        self,
        node: p.Node,
        reason: p.Reason,
        job: p.AnyJob = None,
        save_within_s: Annotated[
            float | None, Field(ge=0, le=86400, description="Time to save first; null for none.")
        ] = None,
    ) -> ToolAnswer:
        """Take a node out of its job: its round ends, and a spare takes the node's slot."""
        details = {"within_s": save_within_s}
        return self._ask(CommandRequest("drain", reason, job, node=node, details=details))

    def pin_checkpoint(self, job: p.Job, step: p.Step, reason: p.Reason) -> ToolAnswer:
        """Keep a checkpoint: retention never deletes it."""
        return self._ask(CheckpointRequest.of("pin", job, step, reason))

    def unpin_checkpoint(self, job: p.Job, step: p.Step, reason: p.Reason) -> ToolAnswer:
        """Give a checkpoint back to retention, which may delete it."""
        return self._ask(CheckpointRequest.of("unpin", job, step, reason))

    def _ask(self, request: CommandRequest) -> ToolAnswer:
        user = f"{request.user} by MCP" if self._source.is_own else "MCP"
        with self._source.open() as source:
            done: Any = replace(request, user=user).tell(source.api)
        return ToolAnswer(f"Decided: {request.verb}.", done)
