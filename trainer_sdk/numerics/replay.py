"""Runs the function of a step again from the same state, and tells its gradients apart."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trainer_sdk.numerics.judgement import StepResult
from trainer_sdk.numerics.replica_hash import bits_sum
from trainer_sdk.numerics.snapshot import RandomStates, Snapshot, TrainingParts, local

NO_BATCH: Any = object()
_MIX = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1
_ROUNDING = 1e-5
_is_cast = getattr(torch._C, "_is_any_autocast_enabled", lambda: True)  # noqa: SLF001 - a tenth
_PART = 1 << 24
"""The most elements that are compared at once."""


class StepCall:
    """A call of the training's function, which can be made again."""

    __slots__ = ("_casts", "batch", "before", "function", "loss")

    def __init__(self, function: Callable[..., Any], batch: Any, before: RandomStates) -> None:
        self.function = function
        self.batch = batch
        self.before = before
        self.loss: float | Tensor | None = None
        self._casts = _casts() if _is_cast() else ()

    def run(self, batch: Any = NO_BATCH) -> Any:
        """Call the function, and keep its loss."""
        batch = self.batch if batch is NO_BATCH else batch
        given = () if batch is NO_BATCH else (batch,)
        result = self._cast_run(given) if self._casts else self.function(*given)
        self.loss = _loss_of(result)
        return result

    def _cast_run(self, given: Any) -> Any:
        with ExitStack() as casting:
            for kind, dtype in self._casts:  # a script that runs it again may have left its own
                casting.enter_context(torch.autocast(kind, dtype))
            return self.function(*given)


def loss_of(calls: Sequence[StepCall]) -> float | None:
    """The sum of the losses of all calls; None if the function returns none."""
    losses = [float(call.loss) for call in calls if call.loss is not None]
    return math.fsum(losses) if all(map(math.isfinite, losses)) and losses else _odd(losses)


class ModulePasses:
    """Hashes of what each module of a state gets and gives, forward and then backward.

    With a pipeline this is what its stages send to each other.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        self._seen: list[tuple[int, int, Tensor]] = []
        self._tensors = 0

    def hooks(self) -> Iterator[Any]:
        """Begin to record; the handles of the hooks."""
        for number, module in enumerate(self._modules):
            got = 4 * number
            before, after = partial(self._before, got), partial(self._after, got)
            yield module.register_forward_pre_hook(before, with_kwargs=True)
            yield module.register_forward_hook(after)

    def clear(self) -> None:
        """Forget what was recorded."""
        self._seen.clear()
        self._tensors = 0

    def read(self) -> tuple[int, ...]:
        """What each module got and gave, and got and gave backward; empty if not recorded."""
        if not self._seen:
            return ()
        hashes = [0] * 4 * len(self._modules)
        for way, factor, word in self._seen:
            hashes[way] = (hashes[way] + factor * int(word)) & _WORD
        return tuple(value >> 1 for value in hashes)

    def _before(self, way: int, _: object, args: Any, kwargs: Any) -> None:
        self._see_all(way, way + 3, (args, kwargs))

    def _after(self, way: int, _: object, __: object, output: Any) -> None:
        self._see_all(way + 1, way + 2, output)

    def _see_all(self, way: int, backward: int, values: Any) -> None:
        if torch.compiler.is_compiling():
            return
        for tensor in pytree.tree_leaves(values):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                self._tensors += 1
                factor = 2 * self._tensors + 1
                self._see(way, factor, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(partial(self._see, backward, factor))  # type: ignore[no-untyped-call]

    def _see(self, way: int, factor: int, tensor: Tensor) -> None:
        self._seen.append((way, factor, bits_sum(local(tensor))))


class OwnGradients:
    """Hashes and norms of the gradients that this rank computes, before any reduction.

    The hooks get what backward adds to a parameter: with DDP and FSDP that is this rank's alone.
    """

    def __init__(self, parts: TrainingParts) -> None:
        self._parts = parts
        self.passes = ModulePasses(parts.modules if parts.is_staged else ())
        self._seen: list[tuple[int, Tensor, Tensor]] = []
        self._watched: list[list[int]] = []
        """The tensors with a hook, in each block: FSDP makes its own in the first step."""

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the gradients of all calls in the block, besides those before it."""
        tensors = [tensor for _, tensor in self._parts.local_parameters()]
        self._watched.append(list(map(id, tensors)))
        handles = [
            tensor.register_hook(partial(self._see, index))  # type: ignore[no-untyped-call]
            for index, tensor in enumerate(tensors)
        ]
        handles += self.passes.hooks()
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def clear(self) -> None:
        """Forget what was recorded."""
        self._seen.clear()
        self._watched.clear()
        self.passes.clear()

    def result(self, loss: float | None) -> StepResult:
        """The result of a step with this loss; it waits for the device."""
        passes = self.passes.read()
        hashes, norm = self.read()
        return StepResult(0.0 if loss is None else loss, norm, hashes, passes)

    def read(self) -> tuple[tuple[int, ...], float | None]:
        """The hash of each parameter group, and the norm; it waits for the device."""
        local_parameters = self._parts.local_parameters()
        present = [id(tensor) for _, tensor in local_parameters]
        if not self._seen or any(watched != present for watched in self._watched):
            return (), None
        owners = [group for group, _ in local_parameters]
        hashes = [0] * len(self._parts.groups)
        words = torch.stack([word.cpu() for _, word, _ in self._seen]).tolist()
        squares = torch.stack([square.cpu() for _, _, square in self._seen]).tolist()
        # The order in which backward reaches parameters is not always the same.
        order = sorted(range(len(words)), key=lambda at: self._seen[at][0])
        for at in order:
            group = owners[self._seen[at][0]]
            hashes[group] = ((hashes[group] * _MIX) ^ (words[at] & _WORD)) & _WORD
        self.clear()
        norm = math.sqrt(total) if (total := sum(squares)) >= 0 else total
        return tuple(value >> 1 for value in hashes), norm

    def _see(self, index: int, gradient: Tensor) -> None:
        own = local(gradient)
        self._seen.append((index, bits_sum(own), square_sum(own)))


def run_again(parts: TrainingParts, calls: Sequence[StepCall], before: Snapshot) -> StepResult:
    """Make the calls of a step again as they were, and return their result.

    Where calls contain collectives, all ranks come here together.
    """
    before.put_back()
    return recorded_run(parts, calls)


def recorded_run(
    parts: TrainingParts, calls: Sequence[StepCall], others: Sequence[tuple[Any, RandomStates]] = ()
) -> StepResult:
    """Make the calls, or the same with the batches and random states of another rank."""
    own = OwnGradients(parts)
    kept = [call.loss for call in calls]
    inputs = others or [(call.batch, call.before) for call in calls]
    with own.recorded():
        for call, (batch, states) in zip(calls, inputs, strict=True):
            states.put_back()
            call.run(batch)
    loss = loss_of(calls)
    for call, former in zip(calls, kept, strict=True):
        call.loss = former
    return own.result(loss)


@torch.no_grad()
def deviation(first: Sequence[Tensor | None], second: Sequence[Tensor | None]) -> float:
    """How far gradients are from others, relative to their norm.

    The first may have been clipped, by their norm or by their values. So neither a factor counts
    nor a limit, nor what the clipping rounds off. NaN if the second have no finite norm: to clip
    by such a norm leaves nothing of the first that could be compared.
    """
    pairs = list(_parts(first, second))
    squares = sum(float(square_sum(other)) for _, other in pairs)
    firsts = sum(float(square_sum(one)) for one, _ in pairs)
    if not math.isfinite(squares):
        return math.nan
    if not math.isfinite(firsts):
        return math.inf
    if not firsts or not squares:
        return 0.0 if firsts == squares else math.inf
    dots = sum(float((one.double() * other.double()).sum()) for one, other in pairs)
    limit = max(float(one.abs().max()) for one, _ in pairs)
    clamped = sum(float(square_sum(one - other.clamp(-limit, limit))) for one, other in pairs)
    relative = math.sqrt(clamped / firsts)
    if dots > 0:
        factor = dots / squares
        scaled = sum(float(square_sum(one - factor * other)) for one, other in pairs)
        relative = min(relative, math.sqrt(scaled / squares) / factor)
    rounding = max(torch.finfo(one.dtype).eps for one, _ in pairs)
    return relative if relative > max(_ROUNDING, rounding) else 0.0


def _parts(
    first: Sequence[Tensor | None], second: Sequence[Tensor | None]
) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of both: of large tensors no whole copy in another type is made."""
    for one, other in zip(first, second, strict=True):
        if one is None or other is None:
            continue
        parts = (local(one).reshape(-1), local(other).reshape(-1))
        yield from (
            (part, another.to(part.device))
            for part, another in zip(*(torch.split(whole, _PART) for whole in parts), strict=True)
            if part.numel()
        )


def square_sum(tensor: Tensor) -> Tensor:
    """The sum of the squares, as a number of high precision."""
    is_half = tensor.dtype in (torch.float16, torch.bfloat16)
    norm: Tensor = torch.linalg.vector_norm(tensor, dtype=torch.float32 if is_half else None)
    return norm.double().square()


def _casts() -> tuple[tuple[str, torch.dtype], ...]:
    """The kinds of devices for which the script has entered `torch.autocast`, and to what."""
    return tuple(
        (kind, torch.get_autocast_dtype(kind))
        for kind in ("cuda", "cpu")
        if torch.is_autocast_enabled(kind)
    )


def _loss_of(result: Any) -> float | Tensor | None:
    if isinstance(result, (tuple, list)) and result:
        result = result[0]
    try:
        if isinstance(result, Tensor):
            if result.is_cuda and result.numel() == 1:
                return result.detach().clone()
            result = result.item()
        return float(result)
    except (TypeError, ValueError, RuntimeError):
        return None


def _odd(losses: list[float]) -> float | None:
    return sum(losses) if losses else None
