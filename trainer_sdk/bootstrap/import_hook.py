"""Calls a function once the script has imported a module, without importing it."""

import sys

TYPE_CHECKING = False  # `typing` would cost every rank a third of the whole bootstrap
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    from trainer_sdk.bootstrap.agent_link import AgentLink

_COMPILER = "torch._dynamo.callback"


def when_imported(name: str, then: "Callable[[], None]") -> None:
    """Call `then` now if the module is loaded, else right after the script imports it, if ever."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _ImportWaiter(name, then))


def watch_compiling(link: "AgentLink") -> None:
    """Show on the rank's page when torch compiles, once its compiler is imported."""

    def listen() -> None:
        from trainer_sdk.bootstrap import compilation  # most scripts do not compile

        compilation.listen(sys.modules[_COMPILER], link)

    when_imported(_COMPILER, listen)


class _ImportWaiter:
    """A finder that finds nothing itself, and calls `then` when the module's body has run."""

    def __init__(self, name: str, then: "Callable[[], None]") -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, name: str, path: "Sequence[str] | None", target: "ModuleType | None" = None
    ) -> "ModuleSpec | None":
        if name != self._name:
            return None
        sys.meta_path.remove(self)
        spec = _found_by_others(name, path, target)
        if spec is not None and spec.loader is not None:
            _call_after(spec.loader, self._then)
        return spec


def _found_by_others(
    name: str, path: "Sequence[str] | None", target: "ModuleType | None"
) -> "ModuleSpec | None":
    for finder in sys.meta_path:
        spec = finder.find_spec(name, path, target)
        if spec is not None:
            return spec
    return None


def _call_after(loader: "Any", then: "Callable[[], None]") -> None:
    body = loader.exec_module

    def exec_module(module: "ModuleType") -> None:
        vars(loader).pop("exec_module", None)  # `body` may be that of another waiter
        body(module)
        then()

    try:
        loader.exec_module = exec_module
    except AttributeError:
        return  # the loader cannot be changed: `then` is never called, and nothing else fails
