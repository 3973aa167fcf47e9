"""NVRx's queue of asynchronous saves: `AsyncRequest` and `AsyncCallsQueue`.

The function of a request runs in a thread of the rank, after the request's preload function has
copied what it needs. The functions of the writers here only wait for the writer process.
"""

import atexit
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException, _wrap_exception

from trainer_sdk.checkpoint.rank_group import RankGroup, group_of_all
from trainer_sdk.environment import environ
from trainer_sdk.sdk_log import warn

_STATE_AT = 1
"""The argument of a request that the result of its preload function replaces."""
_queues: "weakref.WeakSet[AsyncCallsQueue]" = weakref.WeakSet()


class AsyncRequest(NamedTuple):
    """A save: what to copy now, what to do later, and what to do once all ranks are done."""

    async_fn: Callable[..., Any] | None
    async_fn_args: Sequence[Any]
    finalize_fns: list[Callable[[], Any]]
    async_fn_kwargs: Mapping[str, Any] | None = None
    preload_fn: Callable[[], Any] | None = None
    is_frozen: bool = False
    call_idx: int = 0

    def add_finalize_fn(self, fn: Callable[[], Any]) -> None:
        """Add a function to call once all ranks are done."""
        if self.is_frozen:
            raise RuntimeError("the request is scheduled: add finalize functions before that")
        self.finalize_fns.append(fn)

    def freeze(self) -> "AsyncRequest":
        """The same request, to which nothing can be added."""
        return self._replace(is_frozen=True)

    def execute_sync(self) -> None:
        """Do all of it now; all ranks call it together."""
        self.preloaded().run()
        if dist.is_available() and dist.is_initialized():
            group_of_all().highest([0])  # a barrier
        self.execute_finalize_fns(validate_matching_call_idx=False)

    def execute_finalize_fns(self, validate_matching_call_idx: bool = True) -> int:
        """Call the finalize functions, in their order; returns the request's number."""
        for fn in self.finalize_fns:
            fn()
        if validate_matching_call_idx:
            _check_same_call(_all_ranks(), self.call_idx)
        return self.call_idx

    def preloaded(self) -> "AsyncRequest":
        """The request after its preload function."""
        if self.preload_fn is None:
            return self
        arguments = list(self.async_fn_args)
        arguments[_STATE_AT] = self.preload_fn()
        return self._replace(async_fn_args=tuple(arguments), preload_fn=None)

    def run(self) -> None:
        """Call the function."""
        if self.async_fn is not None:
            self.async_fn(*self.async_fn_args, **(self.async_fn_kwargs or {}))


class _ActiveCall(NamedTuple):
    request: AsyncRequest
    running: "Future[None]"


class AsyncCallsQueue:
    """Requests in the order in which they were scheduled; all ranks schedule the same.

    The arguments are NVRx's, for its worker process; here they have no effect.
    """

    def __init__(
        self,
        persistent: bool = True,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
    ) -> None:
        del persistent, is_daemon, cpu_priority, io_priority, sigterm_timeout, cpu_shm_mode
        self._calls: deque[_ActiveCall] = deque()
        self._scheduled = 0
        self._pool: ThreadPoolExecutor | None = None
        self._group: RankGroup | None = None
        _queues.add(self)

    @classmethod
    def warmup_persistent_caller(
        cls,
        rank: int,
        is_daemon: bool = True,
        cpu_priority: int = 10,
        io_priority: int | None = None,
        sigterm_timeout: float = 30.0,
        cpu_shm_mode: bool = False,
    ) -> None:
        """Do nothing: there is no worker to start."""

    def schedule_async_request(self, async_request: AsyncRequest) -> int:
        """Copy what the request needs, and begin it; returns its number."""
        self._scheduled += 1
        try:
            request = async_request.preloaded()
        except Exception as error:
            failed: Future[None] = Future()
            failed.set_exception(error)  # the other ranks have begun it, and wait for this rank
            self._append(async_request, failed)
            raise
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, thread_name_prefix="everstep-async-save")
        self._append(request, self._pool.submit(request.run))
        return self._scheduled

    def _append(self, request: AsyncRequest, running: "Future[None]") -> None:
        numbered = request.freeze()._replace(call_idx=self._scheduled)
        self._calls.append(_ActiveCall(numbered, running))

    def maybe_finalize_async_calls(
        self, blocking: bool = False, no_dist: bool = False
    ) -> list[int]:
        """Finalize the requests that all ranks have done; returns their numbers.

        With `blocking`, wait for all of them. With `no_dist`, only this rank counts. If a function
        has failed on a rank, `CheckpointException` is raised on all ranks.
        """
        finalized = []
        while self._calls:
            request, running = self._calls[0]
            if blocking:
                running.exception()  # waits for the end
            if not self._is_done(request, running, is_alone=no_dist):
                break
            self._calls.popleft()
            finalized.append(request.execute_finalize_fns(validate_matching_call_idx=False))
        return finalized

    def get_num_unfinalized_calls(self) -> int:
        """The number of requests that are not finalized."""
        return len(self._calls)

    def close(self, abort: bool = False) -> None:
        """Wait for the requests and finalize them, or abandon them."""
        if not abort:
            self.maybe_finalize_async_calls(blocking=True)
        self._calls.clear()
        if self._pool is not None:
            self._pool.shutdown(wait=not abort, cancel_futures=True)
            self._pool = None

    def _is_done(self, request: AsyncRequest, running: "Future[None]", *, is_alone: bool) -> bool:
        """Whether all ranks are done with the request; raises if it has failed on one."""
        error = running.exception() if running.done() else None
        group = RankGroup(None) if is_alone else self._ranks()
        is_open, has_failed, largest, smallest = group.highest(
            [not running.done(), error is not None, request.call_idx, -request.call_idx]
        )
        if largest != -smallest:
            raise RuntimeError(
                f"rank {group.rank} finalizes save {request.call_idx} while others finalize "
                f"{-smallest} to {largest}: all ranks must schedule the same saves"
            )
        if has_failed and not is_open:
            self._calls.popleft()
            texts = group.gather("" if error is None else f"{type(error).__name__}: {error}", str)
            raise failure("write", {rank: text for rank, text in enumerate(texts) if text})
        return not is_open

    def _ranks(self) -> RankGroup:
        if self._group is None:
            self._group = _all_ranks()
        return self._group


def failure(step: str, texts: Mapping[int, str]) -> CheckpointException:
    """The error of torch for the failures of some ranks."""
    return CheckpointException(
        step, {rank: _wrap_exception(RuntimeError(text)) for rank, text in texts.items()}
    )


def abort_nvrx_checkpoint() -> None:
    """Abandon the requests of every queue."""
    for queue in list(_queues):
        queue.close(abort=True)


def _all_ranks() -> RankGroup:
    return group_of_all(environ.get("WORLD_SIZE", ""))


def _check_same_call(group: RankGroup, call_idx: int) -> None:
    largest, smallest = group.highest([call_idx, -call_idx])
    if largest != -smallest:
        raise RuntimeError(
            f"rank {group.rank} finalizes save {call_idx} while others finalize {-smallest} to "
            f"{largest}: all ranks must schedule the same saves"
        )


def _warn_of_open_calls() -> None:
    count = sum(queue.get_num_unfinalized_calls() for queue in list(_queues))
    if count:
        warn(
            f"{count} asynchronous saves were never finalized, and cannot be restored: call "
            "maybe_finalize_async_calls(blocking=True) before the end"
        )


atexit.register(_warn_of_open_calls)
