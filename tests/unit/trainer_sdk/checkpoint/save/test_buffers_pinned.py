"""The memory of saves is pinned by the device that its process uses; CUDA may refuse that."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from trainer_sdk.checkpoint.save.buffers import Buffer

SIZE = 1 << 16
OUT_OF_MEMORY = 2
PORTABLE = 1


class Runtime:
    """CUDA as its documentation says: a failed call returns its error, and leaves it behind."""

    def __init__(self, contexts: tuple[int, ...], refuses: int = 0) -> None:
        self.contexts = contexts
        self.device = 0
        self.left = 0
        self.registered: dict[int, tuple[int, int]] = {}
        self._refuses = refuses

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        assert self.device in self.contexts, "a context is opened on a device of another rank"
        assert (size, flags) == (SIZE, PORTABLE)
        self.left = self._refuses
        if not self._refuses:
            self.registered[address] = (size, self.device)
        return self._refuses

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert self.device in self.contexts
        del self.registered[address]  # of what was not registered it is an error
        return 0

    def launch(self, *_: Any, **__: Any) -> None:
        error, self.left = self.left, 0
        if error:
            raise RuntimeError("CUDA error: out of memory")


def use(monkeypatch: pytest.MonkeyPatch, runtime: Runtime) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(runtime.contexts))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "device", runtime.on)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    has = runtime.contexts.__contains__
    monkeypatch.setattr(torch._C, "_cuda_hasPrimaryContext", has, raising=False)
    monkeypatch.setattr(torch, "zeros", runtime.launch)


def test_a_rank_pins_by_its_own_device_also_in_a_thread_that_begins_with_device_0(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, buffer = Runtime(contexts=(3,)), Buffer()
    use(monkeypatch, runtime)
    buffer.fit(SIZE)
    assert runtime.registered == {buffer.octets.data_ptr(): (SIZE, 3)}
    buffer.remove()
    assert runtime.registered == {}


def test_what_cuda_does_not_pin_is_used_as_it_is_and_the_training_gets_no_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, buffer = Runtime(contexts=(0,), refuses=OUT_OF_MEMORY), Buffer()
    use(monkeypatch, runtime)
    buffer.fit(SIZE)
    runtime.launch()
    buffer.octets.fill_(7)
    buffer.remove()


def test_a_process_that_does_not_use_its_device_gets_no_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    runtime, buffer = Runtime(contexts=()), Buffer()
    use(monkeypatch, runtime)
    buffer.fit(SIZE)
    buffer.remove()
    assert runtime.registered == {}
