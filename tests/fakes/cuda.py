"""A stand-in for `torch.cuda`: streams and events as torch 2.13 documents them.

An event is done once the accelerator has passed it, which a test decides. `query` says whether it
is, and true of one that was never recorded; `elapsed_time` is in milliseconds, and raises
RuntimeError unless both were recorded with timing and are done. Work for a stream that is captured
must not be asked for: a query ends the capture with an error.
"""

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stream:
    device_index: int = 0
    number: int = 0


@dataclass
class Cuda:
    """What the SDK uses of it."""

    initialised: bool = True
    captures: bool = False
    stream: Stream = field(default_factory=Stream)
    clock_ms: float = 0.0
    done_ms: float = 0.0
    """How far the accelerator is."""
    events: "list[Event]" = field(default_factory=list)
    error: Exception | None = None
    """What each call raises."""

    def is_initialized(self) -> bool:
        return self.initialised

    def is_current_stream_capturing(self) -> bool:
        return self.captures

    def current_stream(self) -> Stream:
        return self.stream

    def Event(self, *, enable_timing: bool = False) -> "Event":  # noqa: N802 - as torch names it
        event = Event(self, enable_timing)
        self.events.append(event)
        return event

    def synchronize(self) -> None:
        raise AssertionError("the training waits for its accelerator")

    def run(self, ms: float) -> None:
        """Give the accelerator work for this time."""
        self.clock_ms += ms

    def finish(self) -> None:
        """Let the accelerator do all that it was given."""
        self.done_ms = self.clock_ms

    def checked(self) -> None:
        if self.error is not None:
            raise self.error


@dataclass
class Event:
    cuda: Cuda
    enable_timing: bool
    at_ms: float | None = None
    device: int | None = None

    def record(self, stream: Stream | None = None) -> None:
        self.cuda.checked()
        if self.cuda.captures:
            raise RuntimeError("recorded into a graph")
        device = (stream or self.cuda.stream).device_index
        if self.device not in (None, device):
            raise RuntimeError("Event device does not match recording stream's device")
        self.device, self.at_ms = device, self.cuda.clock_ms

    def query(self) -> bool:
        self.cuda.checked()
        if self.cuda.captures:
            raise RuntimeError("operation not permitted when stream is capturing")
        return self.at_ms is None or self.at_ms <= self.cuda.done_ms

    def elapsed_time(self, end: "Event") -> float:
        if not (self.enable_timing and end.enable_timing):
            raise RuntimeError("both events must have timing enabled")
        if self.at_ms is None or end.at_ms is None:
            raise RuntimeError("Both events must be recorded before calculating elapsed time.")
        if not (self.query() and end.query()):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return end.at_ms - self.at_ms

    def synchronize(self) -> None:
        raise AssertionError("the training waits for its accelerator")
