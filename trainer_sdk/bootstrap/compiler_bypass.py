"""A training that compiles nothing does not import torch's compiler, which takes as long as torch.

The base class of all optimizers has four methods that ask the compiler, each time they are called,
to leave them alone; the first call imports it for that. Where it is not loaded nothing is compiled,
so that they may run as they are.
"""

import sys

from trainer_sdk.bootstrap.import_hook import when_imported

TYPE_CHECKING = False  # as in torch_hooks
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType
    from typing import Any

_DYNAMO = "torch._dynamo"


def spare_compiler() -> None:
    """Call those methods directly, until the compiler is imported for another reason."""
    if _DYNAMO in sys.modules:
        return
    from torch.optim import Optimizer  # the script has imported torch

    asks = _code_of_asking()
    if asks is None:
        return  # a torch that asks in another way: nothing is lost but the time
    asking = {name: method for name, method in vars(Optimizer).items() if _code(method) is asks}
    plain = {name: _plain(method) for name, method in asking.items()}
    for name, method in plain.items():
        setattr(Optimizer, name, method)

    def restore() -> None:
        for name, method in asking.items():
            if vars(Optimizer).get(name) is plain[name]:
                setattr(Optimizer, name, method)

    when_imported(_DYNAMO, restore)


def _plain(asking: "Callable[..., Any]") -> "Callable[..., Any]":
    from functools import wraps  # torch has loaded it

    method = asking.__wrapped__  # type: ignore[attr-defined]

    @wraps(method)
    def run(*arguments: "Any", **named: "Any") -> "Any":
        # Somebody may have kept this from before the compiler was there.
        return (asking if _DYNAMO in sys.modules else method)(*arguments, **named)

    return run


def _code_of_asking() -> "CodeType | None":
    """Of what torch makes of each such method."""
    decorate = getattr(sys.modules.get("torch._compile"), "_disable_dynamo", None)
    return None if decorate is None else _code(decorate(lambda: None))


def _code(function: "Any") -> "CodeType | None":
    return getattr(function, "__code__", None)
