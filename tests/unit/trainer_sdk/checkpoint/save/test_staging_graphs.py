"""CUDA graphs: a replay changes tensors as a step does, and a capture must not wait for a copy."""

import pytest
import torch

from trainer_sdk.checkpoint.save.staging import Stager, Staging


class Event:
    device = torch.device("cpu")

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def synchronize(self) -> None:
        self._log.append("the host has waited")


class Stream:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def wait_event(self, _: Event) -> None:
        self._log.append("the stream waits")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []

    class Graph:
        def capture_begin(self) -> None:
            log.append("captures")

        def replay(self) -> None:
            log.append("replays")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream(log))
    return log


def staged(log: list[str]) -> Stager:
    """A stager with a copy that a device has not finished."""
    stager = Stager()
    stager.watch([])
    staging = Staging([], lambda _: None)
    staging.events = [Event(log)]
    staging.left.set()
    stager._present = staging
    return stager


def test_a_replay_waits_for_the_copy_and_only_the_first_one(log: list[str]) -> None:
    stager = staged(log)
    graph = torch.cuda.CUDAGraph()
    graph.replay()
    graph.replay()
    assert log == ["the stream waits", "replays", "replays"]
    stager.close()


def test_the_host_waits_before_a_capture_so_that_no_captured_stream_does(log: list[str]) -> None:
    stager = staged(log)
    stager.watch([])  # a second save wraps nothing again
    torch.cuda.CUDAGraph().capture_begin()
    assert log == ["the host has waited", "the stream waits", "captures"]
    torch.cuda.CUDAGraph().replay()
    assert log[3:] == ["replays"]
    stager.close()
