"""Sends the spans of an agent to a collector, where a setting names one."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from everstep.bus.background import in_background
from everstep.clock import SystemClock


@asynccontextmanager
async def exporting_spans(url: str) -> AsyncIterator[None]:
    """Export all spans that end while the block runs."""
    from everstep.observe.traces import SpanExporter  # only where it is wanted: a start is quick

    async with in_background(SpanExporter(url, "agent", SystemClock()).export_for_ever()):
        yield
