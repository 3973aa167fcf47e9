"""Answer AI assistants that speak the Model Context Protocol, read-only."""

import click

from everstep_services.cli.invocation import Invocation, with_api_options


@click.command()
@click.option(
    "--http", "is_http", is_flag=True, help="Serve streamable HTTP instead of stdin and stdout."
)
@click.option("--host", default="127.0.0.1", help="Where to listen (127.0.0.1).")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=7077, help="7077; 0 takes any free port."
)
@click.option(
    "--allowed-host",
    "hosts",
    multiple=True,
    metavar="NAME[:PORT]",
    help="Also serve requests to this host; may be given several times.",
)
@click.option(
    "--allowed-origin",
    "origins",
    multiple=True,
    metavar="ORIGIN",
    help="Also serve web pages of this origin; may be given several times.",
)
@click.option(
    "--allow-changes",
    is_flag=True,
    help="Also offer tools that exclude and drain nodes and pin checkpoints.",
)
@with_api_options
def command(  # noqa: PLR0913  each is an option
    invocation: Invocation,
    *,
    is_http: bool,
    host: str,
    port: int,
    hosts: tuple[str, ...],
    origins: tuple[str, ...],
    allow_changes: bool,
) -> int:
    """Answer AI assistants that speak the Model Context Protocol (MCP), read-only.

    On stdin and stdout, answers come from the API, or from the record on disk if no service runs.
    With --http, each client sends a token of Everstep as `Authorization: Bearer`, and sees what
    the token may see. It needs the extra: pip install 'everstep[mcp]'.
    """
    if not is_http and ((host, port) != ("127.0.0.1", 7077) or hosts or origins):
        raise click.UsageError("--host, --port, --allowed-host and --allowed-origin need --http")
    from everstep_services.cli.mcp_server.start import HttpOptions, serve_http, serve_stdio

    if not is_http:
        return serve_stdio(invocation, allows_changes=allow_changes)
    return serve_http(
        invocation, HttpOptions(host, port, hosts, origins), allows_changes=allow_changes
    )
