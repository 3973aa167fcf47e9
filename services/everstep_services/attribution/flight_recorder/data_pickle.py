"""An unpickler for data: dictionaries, lists, tuples, strings and numbers, and nothing else.

Whatever a pickle can run, it runs through a name that it has imported or a persistent id. Both are
refused here, so nothing is left to call. Memory is the caller's concern: a few bytes can ask for
gigabytes, so dumps are read in a process with a limit (`folder.py`).
"""

import io
import pickle  # noqa: TID251  torch writes its dumps so; this reads data alone
from typing import Any, NoReturn


class NotDataError(Exception):
    """A pickle imports something, is truncated, or is not a pickle."""


class _DataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> NoReturn:
        raise NotDataError(f"it wants to import {module[:80]}.{name[:80]}, which no dump needs")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise NotDataError(f"it refers to something outside of itself ({str(pid)[:80]!r})")


def load_data(content: bytes) -> Any:
    """The data of a pickle. Raises `NotDataError` for everything that is not data."""
    try:
        # The unpickler reads three times as fast from a file that it can peek into.
        file = io.BufferedReader(io.BytesIO(content))
        return _DataUnpickler(file, errors="replace").load()
    except NotDataError:
        raise
    except MemoryError:
        raise NotDataError("it asks for more memory than a dump may take") from None
    except Exception as error:
        raise NotDataError(f"it is not a complete pickle: {error}") from error
