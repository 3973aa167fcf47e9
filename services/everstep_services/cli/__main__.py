"""Where `everstep` starts: read the environment, find the command, turn errors into codes."""

import contextlib
import errno
import gc
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from everstep.errors import EverstepError

if TYPE_CHECKING:
    import click


_COLLECT_AFTER = (10_000, 20, 10)
"""As services that are open: with Python's own, a sixth of their imports is looking for garbage."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Raises only what is a bug."""
    gc.set_threshold(*_COLLECT_AFTER)
    try:
        code = _run(arguments)
    except ModuleNotFoundError as error:
        code = _missing(error)
    except OSError as error:
        code = _unprinted(error)
    lost = _let_go(sys.stdout)
    if lost:
        sys.stderr.write(f"everstep: the output is incomplete: {lost}\n")
    _let_go(sys.stderr)
    return code or int(bool(lost))


def ft_launcher() -> int:
    """NVRx's program of this name: `everstep run --as-nvrx`."""
    return main(["run", "--as-nvrx", *sys.argv[1:]])


def _run(arguments: Sequence[str] | None) -> int:
    import click

    from everstep_services.cli.group import everstep
    from everstep_services.cli.invocation import Invocation

    invocation = Invocation(environ=os.environ)
    try:
        code = everstep.main(arguments, "everstep", standalone_mode=False, obj=invocation)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        return _misused(error)
    except EverstepError as error:
        return _told(error)
    except (click.Abort, KeyboardInterrupt):
        return 130
    except SystemExit as error:  # click's own way out of completion, and of a closed pipe
        code = error.code
    return code if isinstance(code, int) else 0


def _unprinted(error: OSError) -> int:
    if isinstance(error, BrokenPipeError):
        return 0  # the reader has seen enough (`| head`)
    if error.errno not in {errno.ENOSPC, errno.EDQUOT, errno.EIO}:
        raise error
    sys.stderr.write(f"everstep: {error.filename or 'what is printed'}: {error.strerror}\n")
    return 1


def _let_go(stream: TextIO) -> str:
    """Write the rest; why that failed, unless the reader has merely seen enough (`| head`).

    What cannot be written is dropped, or Python would make it the exit code, 120.
    """
    try:
        stream.flush()
    except (OSError, ValueError) as error:
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
        return "" if isinstance(error, BrokenPipeError) else str(error)
    return ""


_EXTRAS = {
    **dict.fromkeys(["click", "httpx2", "rich"], "cli"),
    **dict.fromkeys(["nats", "xxhash", "zstandard"], "bus"),
    **dict.fromkeys(["numpy", "pyarrow"], "traces"),
    **dict.fromkeys(["mcp", "mcp_types"], "mcp"),
    "asyncpg": "postgres",
}
"""The extra that brings a module; `services` brings the others."""


def _missing(error: ModuleNotFoundError) -> int:
    module = (error.name or "").partition(".")[0]
    if module in {"", "everstep", "everstep_services", "trainer_sdk"}:
        raise error  # ours: a bug, not an installation
    extra = _EXTRAS.get(module, "services")
    sys.stderr.write(f"everstep: {module} is missing: pip install 'everstep[{extra}]'\n")
    return 1


_LISTED_BY = {
    "job": "everstep jobs lists jobs",
    "node": "everstep nodes lists nodes",
    "step": "everstep ckpt ls lists steps",
    "where": "a job, as everstep jobs lists them, or a folder as ./ckpt",
    "who": "a job, @service or @admin",
}
"""What people need to know to give a missing argument."""


def _misused(error: "click.ClickException") -> int:
    """One line like all others, instead of click's three."""
    text = " ".join(error.format_message().split()).rstrip(".")
    parameter = getattr(error, "param", None)
    if text.startswith("Missing argument") and parameter and parameter.name in _LISTED_BY:
        text += f": {_LISTED_BY[parameter.name]}"
    where = getattr(error, "ctx", None)
    see = "" if where is None or text.endswith("?") else f"; see {where.command_path} --help"
    from everstep.observe.printable import printable

    sys.stderr.write(printable(f"everstep: {text}{see}") + "\n")
    return error.exit_code


def _told(error: EverstepError) -> int:
    from everstep.runtime import one_line
    from everstep_services.cli.errors import exit_code

    sys.stderr.write(f"everstep: {one_line(error)}\n")
    return exit_code(error)


if __name__ == "__main__":
    sys.exit(main())
