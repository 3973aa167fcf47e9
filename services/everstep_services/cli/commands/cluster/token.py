"""Make, list and revoke tokens of the API."""

from pathlib import Path
from typing import Any

import click

from everstep_services.cli.invocation import NAME, Invocation, with_api_options
from everstep_services.cli.output import echo, print_record, print_records, say
from everstep_services.cli.times import SpanParameter

COLUMNS = ["id", "name", "scope", "created_at", "expires_at", "last_used_at", "revoked_at"]


@click.group()
def command() -> None:
    """Make, list and revoke tokens of the API."""


@command.command()
@click.argument("name", type=NAME)
@click.option(
    "--scope",
    type=click.Choice(["webhook", "read", "operate", "admin"]),
    default="read",
    show_default=True,
    help="What the token allows; admin includes operate, and operate includes read.",
)
@click.option(
    "--expires",
    type=SpanParameter(),
    metavar="SPAN",
    help="The token expires after this time, as 30d.",
)
@click.option(
    "--database",
    metavar="URL",
    help="Write into this database instead of asking the API: for the first token.",
)
@click.option(
    "--database-password-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The file with the password for the database.",
)
@with_api_options
def create(
    invocation: Invocation,
    *,
    name: str,
    scope: str,
    expires: int | None,
    database: str | None,
    database_password_file: Path | None,
) -> None:
    """Make a token for NAME and print it. It cannot be shown again."""
    if database is not None:
        from everstep_services.cli.machine.first_token import make_token

        made: dict[str, Any] = make_token(
            database, database_password_file, name=name, scope=scope, expires_in_s=expires
        )
    else:
        with invocation.open_api() as api:
            made = api.post("tokens", {"name": name, "scope": scope, "expires_in_s": expires})
    if invocation.output is None:
        say(f"token {made['id']} with scope {scope} for {name}; keep it, it is shown only now")
        echo(made["token"])
    else:
        print_record(invocation, "new_token", made, name="id")


@command.command()
@with_api_options
def ls(invocation: Invocation) -> None:
    """List the tokens. Their secrets are not stored."""
    with invocation.open_api() as api:
        records = list(api.pages("tokens", {}, most=None))
    print_records(invocation, "token", records, COLUMNS)


@command.command()
@click.argument("token_id", type=NAME)
@with_api_options
def revoke(invocation: Invocation, token_id: str) -> None:
    """Revoke the token with this id, for ever."""
    with invocation.open_api() as api:
        api.delete("tokens", token_id)
    say(f"revoked token {token_id}")
