"""Warnings to the training: lines of the logger `trainer_sdk`.

If the script has configured no logging, they go to stderr. This module does not import `logging`:
each rank imports this package before its script, and many scripts never use `logging`.
"""

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from logging import Logger

_MOST = 64
_LONGEST = 200

_printed: set[str] = set()


def warn_once(text: str) -> None:
    """Warn, unless the same text was printed before; the number of texts is limited."""
    if text in _printed or len(_printed) >= _MOST:
        return
    _printed.add(text)
    warn(text)


def warn(text: str, rank: int | None = None) -> None:
    """Log one warning; it is lost if there is no logger and no stderr. The record has the rank."""
    line = text if rank is None else f"rank {rank}: {text}"
    try:
        logger = _configured_logger()
        if logger is None:
            sys.stderr.write(f"everstep: {line}\n")
        else:
            logger.warning("%s", line, extra={"rank": rank})
    except Exception:  # noqa: BLE001 - stderr is closed, or the script's handler fails
        return


def _configured_logger() -> "Logger | None":
    """The SDK's logger, if the script has configured a handler that receives its lines."""
    logging = sys.modules.get("logging")
    if logging is None or not hasattr(logging, "getLogger"):
        return None
    logger: Logger = logging.getLogger("trainer_sdk")
    return logger if logger.hasHandlers() else None


def quoted(value: object) -> str:
    """The text of any value as JSON, shortened."""
    from json import dumps  # imported only for rare lines

    try:
        return dumps(str(value)[:_LONGEST])
    except Exception:  # noqa: BLE001 - the script's own `__str__` may raise anything
        return f'"{type(value).__name__}"'
