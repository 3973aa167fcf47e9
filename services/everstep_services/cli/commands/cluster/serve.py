"""Serve the history in a file of `everstep export`: pages and REST, on this machine."""

from pathlib import Path

import click

from everstep_services.cli.invocation import Invocation, with_common_options

_LARGEST_GIB = 16


@click.command()
@click.option(
    "--bundle",
    type=click.Path(path_type=Path),
    metavar="FILE",
    required=True,
    help="The file that `everstep export` has written.",
)
@click.option("--host", default="127.0.0.1", help="Where to listen (127.0.0.1).")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, help="0, the default, takes any free port."
)
@click.option(
    "--max-gib",
    type=click.IntRange(1, 1024),
    default=_LARGEST_GIB,
    metavar="GIB",
    help=f"Refuse a bundle that unpacks to more ({_LARGEST_GIB}).",
)
@with_common_options
def command(invocation: Invocation, *, bundle: Path, host: str, port: int, max_gib: int) -> int:
    """Serve the history in a bundle, until Ctrl-C.

    The file is unpacked into a folder that is removed afterwards, and is not changed. A link that
    logs in once is printed, and a file with a token that may only read, for commands and programs.
    """
    from everstep_services.cli.stack.bundle import serve_bundle

    return serve_bundle(invocation, bundle, host, port, max_gib)
