"""Tells which of two devices is right: each computes torch's own modules in double precision, too.

Another precision uses other kernels and other parts of a device. So a device whose result is far
from its own one in double precision computes wrongly, if that of the other device is not.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from trainer_sdk.numerics.replica_hash import local_part

_CHECKED = frozenset(
    {"linear", "conv", "normalization", "batchnorm", "activation", "sparse", "loss"}
)
"""Modules of `torch.nn.modules`."""
_UNCHECKED = (nn.RReLU, nn.SyncBatchNorm, nn.MultiheadAttention)
"""These draw random numbers, or need other ranks."""
_LEAST = 2e-6
"""More than rounding in single precision."""
_FAR = 32.0


def odd_one(deviations: Mapping[int, Sequence[float]]) -> int | None:
    """The rank, of two, that is far from double precision where the other is not, if known."""
    if len({len(values) for values in deviations.values()}) != 1:
        return None
    odd = set()
    for values in zip(*deviations.values(), strict=True):
        least, *_, most = sorted(values)
        if not most <= _FAR * max(least, _LEAST):
            odd.add(list(deviations)[values.index(most)])
    return odd.pop() if len(odd) == 1 and len(deviations) == 2 else None


class DoubleCheck:
    """How far the results of each checked module are from those in double precision."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        every = {id(module): module for root in modules for module in root.modules()}
        self._modules = [module for module in every.values() if _is_checked(module)]
        self.deviations = [0.0] * len(self._modules)
        self._given: dict[int, tuple[Any, dict[str, Any]]] = {}
        self._expected: dict[int, tuple[Tensor, Tensor]] = {}
        self._watched: dict[int, Any] = {}

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Check all calls in the block."""
        handles: list[Any] = []
        for number, module in enumerate(self._modules):
            before, after = partial(self._before, number), partial(self._after, number)
            handles += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                # Before FSDP takes the parameters away, and backward after it has them again.
                module.register_forward_hook(after, prepend=True),
                module.register_forward_hook(partial(self._last, number)),
            ]
        try:
            yield
        finally:
            for handle in [*handles, *self._watched.values()]:
                handle.remove()

    def _before(
        self, number: int, _: nn.Module, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        """Give the module tensors of its own, so that their gradients are this module's alone."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():
            return args, kwargs
        own = pytree.tree_map_only(Tensor, _alias, (args, kwargs))
        self._given[number] = own
        return own  # type: ignore[no-any-return]

    def _after(self, number: int, module: nn.Module, _: Any, output: Any) -> None:
        given = None if torch.compiler.is_compiling() else self._given.get(number)
        if given is None or not isinstance(output, Tensor):
            return
        with torch.no_grad():
            reference = _attempt(lambda: _double(module, *given)[0])
        if reference is not None:
            floats = [it for it in pytree.tree_leaves(given) if isinstance(it, Tensor)]
            size = sum((_norm(it) for it in floats if it.is_floating_point()), _norm(reference))
            self._note(number, reference, size, output)
        for parameter in module._parameters.values():  # noqa: SLF001 - as autograd has them now
            if parameter is not None and parameter.requires_grad:
                hook = partial(self._of_gradient, number, id(parameter))
                if id(parameter) not in self._watched:
                    self._watched[id(parameter)] = parameter.register_hook(hook)  # type: ignore[no-untyped-call]

    def _last(self, number: int, module: nn.Module, _: Any, output: Any) -> None:
        given = None if torch.compiler.is_compiling() else self._given.pop(number, None)
        if given is not None and isinstance(output, Tensor) and output.requires_grad:
            hook = partial(self._backward, number, module, given)
            output.register_hook(hook)  # type: ignore[no-untyped-call]

    def _backward(self, number: int, module: nn.Module, given: Any, gradient: Tensor) -> None:
        with torch.enable_grad():
            expected = _attempt(lambda: _double_gradients(module, given, gradient))
        size = _norm(gradient)
        for tensor, value in expected or ():
            if isinstance(tensor, nn.Parameter):
                former, before = self._expected.get(id(tensor), (0.0, 0.0))
                self._expected[id(tensor)] = (former + value, before + size)
            else:
                hook = partial(self._note, number, value, size)
                tensor.register_hook(hook)

    def _of_gradient(self, number: int, key: int, gradient: Tensor) -> None:
        expected = self._expected.pop(key, None)
        if expected is not None:
            self._note(number, *expected, gradient)

    @torch.no_grad()
    def _note(self, number: int, reference: Tensor, size: Tensor, result: Tensor) -> None:
        """Note how far a result is, relative to what it was computed of: sums may cancel out."""
        if result.shape != reference.shape or result.layout != torch.strided:
            return
        size = torch.maximum(size, _norm(reference)).clamp_min(1e-30)
        apart = float(_norm(result.double() - reference) / size)
        is_nan = bool((result.isnan() & ~reference.isnan()).any())
        if math.isfinite(apart) or is_nan:
            apart = math.inf if is_nan else apart
            self.deviations[number] = max(self.deviations[number], apart)


def _is_checked(module: nn.Module) -> bool:
    *package, name = type(module).forward.__module__.split(".")
    is_ours = package == ["torch", "nn", "modules"] and name in _CHECKED
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        is_ours = is_ours and module.max_norm is None
    return is_ours and not isinstance(module, _UNCHECKED) and not list(module.children())


def _norm(tensor: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(tensor.detach().double())
    return norm


def _alias(tensor: Tensor) -> Tensor:
    return tensor.view_as(tensor) if tensor.requires_grad else tensor


def _attempt(compute: "Callable[[], Any]") -> Any:
    """What it computes; None if it cannot, as without memory or a kernel for it."""
    try:
        return compute()
    except Exception:  # noqa: BLE001 - then this module tells nothing
        return None


def _wide(tensor: Tensor) -> Tensor:
    if local_part(tensor) is not tensor:
        raise TypeError("a part of a tensor is not enough")
    return tensor.detach().double() if tensor.is_floating_point() else tensor.detach().clone()


def _double(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, dict[int, Tensor]]:
    """What a module returns in double precision, and its tensors there, by the id of their own."""
    wide: dict[int, Tensor] = {}

    def of(tensor: Tensor) -> Tensor:
        copy = _wide(tensor)
        if tensor.requires_grad and torch.is_grad_enabled():
            wide[id(tensor)] = copy.requires_grad_()
        return copy

    twin = object.__new__(type(module))
    twin.__dict__.update(module.__dict__)
    for kind in ("_parameters", "_buffers"):
        tensors = module.__dict__[kind].items()
        twin.__dict__[kind] = {name: it if it is None else of(it) for name, it in tensors}
    args, kwargs = pytree.tree_map_only(Tensor, of, (args, kwargs))
    with torch.autocast(_device_type(args, kwargs), enabled=False):
        return twin.forward(*args, **kwargs), wide


def _double_gradients(
    module: nn.Module, given: tuple[Any, dict[str, Any]], gradient: Tensor
) -> list[tuple[Tensor, Tensor]]:
    """The tensors that get a gradient from a module, and what it is in double precision."""
    output, wide = _double(module, *given)
    own = [*module._parameters.values(), *pytree.tree_leaves(given)]  # noqa: SLF001
    tensors = [it for it in own if isinstance(it, Tensor) and id(it) in wide]
    gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
        output, [wide[id(it)] for it in tensors], gradient.double(), allow_unused=True
    )
    return [(it, value) for it, value in zip(tensors, gradients, strict=True) if value is not None]


def _device_type(args: Any, kwargs: Any) -> str:
    tensors = (leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))
    return next(tensors).device.type
