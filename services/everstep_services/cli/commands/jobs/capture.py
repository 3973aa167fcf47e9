"""Collect evidence of a job that runs, and fetch it: stacks, flight recorders and more."""

from pathlib import Path
from typing import Any

import click

from everstep_services.cli.invocation import Invocation, NumberRange
from everstep_services.cli.operator_requests import with_reason


@click.command()
@click.argument("job")
@click.option(
    "--rank", "ranks", type=click.IntRange(0), multiple=True, metavar="N",
    help="Only of this global rank. May be given several times.",
)  # fmt: skip
@click.option(
    "--kind", "kinds", multiple=True, metavar="KIND",
    help="Only this kind, as stacks or flight_recorder. May be given several times.",
)  # fmt: skip
@click.option(
    "--into", "folder", type=click.Path(path_type=Path, file_okay=False), metavar="DIR",
    help="Fetch it into this folder (capture-ID here).",
)  # fmt: skip
@click.option(
    "--within", "within_s", type=NumberRange(0, 60, min_open=True), default=10.0,
    metavar="SECONDS", help="What is not there by then is missing (10).",
)  # fmt: skip
@with_reason
@click.pass_obj
def command(
    invocation: Invocation, /, *, job: str, folder: Path | None, reason: str, **asked: Any
) -> int:
    """Have agents look at the ranks of a job from outside, and fetch what they see.

    The ranks go on meanwhile, and nothing is counted as an incident. Each piece is printed with
    what it says and its file, or the reason why there is none. `everstep fr analyze` reads
    DIR/flight_recorder then, and `everstep stacks analyze` DIR/stacks.

    Exit codes: 0 every node has answered, 5 not all did in time.
    """
    from everstep_services.cli.api.location import open_api
    from everstep_services.cli.operator_requests import CommandRequest
    from everstep_services.cli.output import say
    from everstep_services.cli.pages.capture import (
        CaptureRequest,
        await_pieces,
        fetch,
        print_pieces,
    )

    with open_api(invocation) as api:
        capture = CaptureRequest.new(api, job, asked["ranks"], asked["kinds"])
        details = {
            "capture": capture.id,
            "ranks": asked["ranks"],
            "evidence": capture.kinds,
            "within_s": asked["within_s"],
        }
        say(str(CommandRequest("capture", reason, job, details=details).tell(api)["text"]))
        told = await_pieces(api, capture, asked["within_s"])
        files = fetch(api, capture, told, folder or Path(f"capture-{capture.id[:12]}"))
    return print_pieces(invocation, capture, told, files)
