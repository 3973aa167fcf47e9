"""Reads traces: tables of operations, and the files of torch.profiler."""

from everstep_services.straggler.traces.columns import TraceError
from everstep_services.straggler.traces.files import Read, read_traces

__all__ = ["Read", "TraceError", "read_traces"]
