"""Show, check and find the settings."""

from pathlib import Path

import click

from everstep.settings import FILE_NAME, SettingsError, config_files, usual_places
from everstep_services.cli.errors import Exit
from everstep_services.cli.invocation import Invocation, with_common_options
from everstep_services.cli.output import print_records, say
from everstep_services.cli.settings_sections import known_sections


@click.group()
def command() -> None:
    """Show, check and find the settings."""


@command.command()
@click.argument("section", required=False)
@with_common_options
def show(invocation: Invocation, section: str | None) -> None:
    """Print each setting (of SECTION), its value, and where the value comes from."""
    sections, missing = known_sections()
    for line in missing:
        say(line)
    if section is not None and section not in sections:
        raise click.BadParameter(f"{section} is none of {', '.join(sections)}")
    rows = invocation.load(sections).rows()
    records = [
        {"key": row.key, "value": row.value, "origin": row.origin, "help": row.help}
        for row in rows
        if section is None or row.key.startswith(f"{section}.")
    ]
    print_records(invocation, "setting", records, ["key", "value", "origin"])


@command.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@with_common_options
def validate(invocation: Invocation, file: Path | None) -> int:
    """Check FILE, or the settings as they apply here. Exit code 1: they are not valid."""
    sections, missing = known_sections()
    for line in missing:
        say(line)
    if file is not None:
        invocation.config = file
    try:
        loaded = invocation.load(sections)
    except SettingsError as error:
        say(f"everstep: {error}")
        return Exit.ERROR
    say(f"valid: {', '.join(map(str, loaded.files)) or 'no file, only defaults'}")
    return Exit.OK


@command.command()
@with_common_options
def path(invocation: Invocation) -> None:
    """Print the files that are read; a later one overrides the earlier ones."""
    files = config_files(invocation.environ, invocation.config)
    print_records(invocation, "settings_file", [{"path": str(file)} for file in files], ["path"])
    if not files:
        looked = ", ".join(map(str, usual_places(invocation.environ)))
        say(f"there is no {FILE_NAME}; looked for {looked}")
