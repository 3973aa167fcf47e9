"""What a training is told: lines of the logger `trainer_sdk`.

Where the script has configured no logging, they go to stderr. The module `logging` is not imported
for them: each rank imports this package before its script, and a script without it needs none.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from logging import Logger

_MOST = 64
_LONGEST = 200

_said: set[str] = set()


def warn_once(text: str) -> None:
    """Say it if it was not said before."""
    if text in _said or len(_said) >= _MOST:
        return
    _said.add(text)
    warn(text)


def warn(text: str, rank: int | None = None) -> None:
    """One line, as a warning; where nothing takes it, nothing happens. The record has the rank."""
    line = text if rank is None else f"rank {rank}: {text}"
    try:
        logger = _configured_logger()
        if logger is None:
            sys.stderr.write(f"everstep: {line}\n")
        else:
            logger.warning("%s", line, extra={"rank": rank})
    except Exception:  # noqa: BLE001 - stderr is closed, or a handler of the script's own fails
        return


def _configured_logger() -> "Logger | None":
    """Ours, if a handler of the script's would hear it."""
    logging = sys.modules.get("logging")
    if logging is None or not hasattr(logging, "getLogger"):
        return None
    logger: Logger = logging.getLogger("trainer_sdk")
    return logger if logger.hasHandlers() else None


def quoted(value: object) -> str:
    """As JSON, shortened; whatever it is."""
    from json import dumps  # only what is rare is said so

    try:
        return dumps(str(value)[:_LONGEST])
    except Exception:  # noqa: BLE001 - a `__str__` of the script's own
        return f'"{type(value).__name__}"'
