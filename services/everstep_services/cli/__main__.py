"""Where `everstep` starts: read the environment, find the command, turn errors into codes."""

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from everstep.errors import EverstepError

if TYPE_CHECKING:
    import click


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code. Raises only what is a bug."""
    try:
        return _run(arguments)
    except ModuleNotFoundError as error:
        return _missing(error)


def _run(arguments: Sequence[str] | None) -> int:
    import click

    from everstep_services.cli.group import everstep
    from everstep_services.cli.invocation import Invocation

    invocation = Invocation(environ=os.environ)
    try:
        code = everstep.main(arguments, "everstep", standalone_mode=False, obj=invocation)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.ClickException as error:
        return _misused(error)
    except EverstepError as error:
        return _told(error)
    except (click.Abort, KeyboardInterrupt):
        return 130
    except BrokenPipeError:
        # The reader has seen enough (`| head`). Python would complain once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except SystemExit as error:  # click's own way out of completion, and of a closed pipe
        code = error.code
    return code if isinstance(code, int) else 0


_EXTRAS = {
    **dict.fromkeys(["click", "httpx2", "rich"], "cli"),
    **dict.fromkeys(["nats", "xxhash", "zstandard"], "bus"),
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


def _misused(error: "click.ClickException") -> int:
    """One line like all others, instead of click's three."""
    said = " ".join(error.format_message().split()).rstrip(".")
    where = getattr(error, "ctx", None)
    see = "" if where is None or said.endswith("?") else f"; see {where.command_path} --help"
    sys.stderr.write(f"everstep: {said}{see}\n")
    return error.exit_code


def _told(error: EverstepError) -> int:
    from everstep.runtime import one_line
    from everstep_services.cli.errors import exit_code

    sys.stderr.write(f"everstep: {one_line(error)}\n")
    return exit_code(error)


if __name__ == "__main__":
    sys.exit(main())
