"""Traces as people have them: tables of operations, and what torch.profiler writes."""

from everstep_services.straggler.traces.errors import TraceError
from everstep_services.straggler.traces.files import Read, read_traces

__all__ = ["Read", "TraceError", "read_traces"]
