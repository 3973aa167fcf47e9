"""Keeps torch's compiler from being imported by a training that does not compile.

To import the compiler takes as long as to import torch. The base class of all optimizers has four
methods that exclude themselves from compilation at each call, and the first call imports the
compiler for that. While the compiler is not loaded, nothing is compiled, so the plain methods can
run instead.
"""

import sys

from trainer_sdk.bootstrap.import_hook import when_imported

TYPE_CHECKING = False  # as in torch_hooks
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType
    from typing import Any

_DYNAMO = "torch._dynamo"


def bypass_compiler() -> None:
    """Call the four plain methods, until something else imports the compiler."""
    if _DYNAMO in sys.modules:
        return
    from torch.optim import Optimizer  # the script has imported torch

    wrapper_code = _wrapper_code()
    if wrapper_code is None:
        return  # another release of torch: the import happens, and costs its time
    wrapped = {
        name: method for name, method in vars(Optimizer).items() if _code(method) is wrapper_code
    }
    plain = {name: _plain(method) for name, method in wrapped.items()}
    for name, method in plain.items():
        setattr(Optimizer, name, method)

    def restore() -> None:
        for name, method in wrapped.items():
            if vars(Optimizer).get(name) is plain[name]:
                setattr(Optimizer, name, method)

    when_imported(_DYNAMO, restore)


def _plain(wrapped: "Callable[..., Any]") -> "Callable[..., Any]":
    from functools import wraps  # torch has loaded it

    method = wrapped.__wrapped__  # type: ignore[attr-defined]

    @wraps(method)
    def run(*arguments: "Any", **named: "Any") -> "Any":
        # A caller may have kept this method from before the compiler was imported.
        return (wrapped if _DYNAMO in sys.modules else method)(*arguments, **named)

    return run


def _wrapper_code() -> "CodeType | None":
    """The code of the wrapper that torch puts around each such method."""
    decorate = getattr(sys.modules.get("torch._compile"), "_disable_dynamo", None)
    return None if decorate is None else _code(decorate(lambda: None))


def _code(function: "Any") -> "CodeType | None":
    return getattr(function, "__code__", None)
