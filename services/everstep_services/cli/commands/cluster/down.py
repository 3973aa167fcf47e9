"""Stop a running `everstep up`."""

import click

from everstep_services.cli.invocation import Invocation, with_common_options
from everstep_services.cli.machine.state import find_state_dir, terminate
from everstep_services.cli.output import say

STOP_WITHIN_S = 40.0


@click.command()
@with_common_options
def command(invocation: Invocation) -> None:
    """Stop the `everstep up` of this state directory. Its data stay."""
    state = find_state_dir(invocation.environ, invocation.state_dir)
    holder = state.holder()
    if holder is None:
        say(f"nothing runs on {state.path}")
        return
    terminate(holder, STOP_WITHIN_S)
    say(f"stopped everstep up on {state.path} (pid {holder.pid})")
