"""How torch's flight recorder is set in each rank, unless the user has set it."""

import os

from trainer_sdk import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping

# A newer torch warns of the second name, an older one knows only that.
OLD_NAMES = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
_RING_ENTRIES = "2000"


def arm_flight_recorder(environ: "MutableMapping[str, str]", folder: str) -> None:
    """Some settings had another name before; either counts as the user's."""
    prefix = os.path.join(folder, layout.FLIGHT_PREFIX)
    for name, value in (
        ("TORCH_FR_BUFFER_SIZE", _RING_ENTRIES),
        ("TORCH_FR_DUMP_TEMP_FILE", prefix),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        # To name the lines of its stacks torch waits for the interpreter's lock while it dumps: a
        # rank that holds the lock would have no dump, or hang in it.
        ("TORCH_INCLUDE_STACK_TRACE", "False"),
    ):
        if OLD_NAMES.get(name, name) not in environ:
            environ.setdefault(name, value)
