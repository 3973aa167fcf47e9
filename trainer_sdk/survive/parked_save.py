"""The save of ranks that are parked: perhaps no round follows, and they hold the newest state.

Only they form a group, without the ranks that are lost. They agree on the newest step, as at the
begin of a round, and save it if every part of the state is there.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from trainer_sdk.environment import environ
from trainer_sdk.sdk_log import warn
from trainer_sdk.survive.default_group import form_group
from trainer_sdk.survive.heal import Healed

if TYPE_CHECKING:
    from trainer_sdk.checkpoint.checkpointer import Checkpointer
    from trainer_sdk.survive.state_copy import State
    from trainer_sdk.wire import SaveTogether


def save_parked(
    order: "SaveTogether",
    state: "State",
    places: frozenset[str],
    make_saves: "Callable[[], Checkpointer]",
    backend: str | None,
    agree: Callable[[], Healed],
) -> None:
    """Save the newest state of the parked ranks, which has to have all `places`.

    `agree` gives each of them that state.
    """
    environ.update(
        RANK=str(order.rank),
        WORLD_SIZE=str(order.world_size),
        MASTER_ADDR=order.master_address,
        MASTER_PORT=str(order.master_port),
    )
    form_group(environ, backend, lambda: False)
    healed = agree()
    if healed.step is None or healed.origin == "fresh":
        warn(f"nothing is saved after the end of the round: {healed.reason}", order.rank)
        return
    if lost := places - healed.places:
        missing = f"{len(lost)} of {len(places)} parts of the state are lost"
        warn(f"step {healed.step} is not saved after the end of the round: {missing}", order.rank)
        return
    saves = make_saves()
    try:
        latest = saves.latest()
        if latest is None or latest.step < healed.step:
            saves.save(healed.step, state, occasion="preemption", wait=True)
    finally:
        saves._close(abort=True, is_failing=True)  # noqa: SLF001 - the same package
