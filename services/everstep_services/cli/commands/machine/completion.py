"""Print the completion script of a shell."""

import click

from everstep_services.cli.invocation import Invocation, with_common_options

SHELLS = ("bash", "zsh", "fish")

HELP = """Print the completion script of SHELL.

\b
bash:  everstep completion bash > ~/.local/share/bash-completion/completions/everstep
zsh:   everstep completion zsh > "${fpath[1]}/_everstep"
fish:  everstep completion fish > ~/.config/fish/completions/everstep.fish
"""


@click.command(help=HELP)
@click.argument("shell", type=click.Choice(SHELLS))
@with_common_options
def command(_invocation: Invocation, shell: str) -> None:
    from click.shell_completion import get_completion_class

    made_by = get_completion_class(shell)
    assert made_by is not None, f"click knows no {shell}"
    root = click.get_current_context().find_root()
    script = made_by(root.command, {}, "everstep", "_EVERSTEP_COMPLETE")
    # Not .source(): for bash it would run the bash of this machine to learn its version.
    click.echo(script.source_template % script.source_vars())
