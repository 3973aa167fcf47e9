"""`Compose`: several plugins of one kind as a single plugin."""

import inspect
from typing import Any

from trainer_sdk.sdk_log import warn_once


class Compose:
    """Calls its plugins from the last to the first, each with the result of the one before.

    It is an instance of the nearest class that all of its plugins have in common.
    """

    instances: tuple[Any, ...]

    def __new__(cls, *instances: Any) -> "Compose":
        """An object of a class made for these plugins."""
        if not instances:
            raise ValueError("Compose needs at least one plugin")
        shared = [
            kind
            for kind in type(instances[0]).__mro__
            if all(isinstance(instance, kind) for instance in instances)
        ]
        bases = (Compose, shared[0]) if shared[0] is not object else (Compose,)
        bases = (shared[0],) if issubclass(shared[0], Compose) else bases
        names: dict[str, Any] = {"__new__": object.__new__, "__init__": object.__init__}
        names |= {"__call__": Compose.__call__, "instances": instances}
        made: Compose = type("Composed", bases, names)()
        return made

    def __call__(self, *arguments: Any) -> Any:
        """The result of the first plugin."""
        result: Any = None
        for instance in reversed(self.instances):
            result = instance(*arguments)
            if result is None and arguments and arguments != (None,):
                warn_once(
                    f"{type(instance).__name__} returned None inside Compose: a plugin returns "
                    "its argument, which the next plugin receives"
                )
            if isinstance(result, tuple):
                arguments = result
            elif result is None and not inspect.signature(instance).parameters:
                arguments = ()
            else:
                arguments = (result,)
        return result
