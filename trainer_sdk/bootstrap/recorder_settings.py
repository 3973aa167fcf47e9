"""Sets torch's flight recorder in each rank, unless the user has set it."""

import os

from trainer_sdk import layout

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import MutableMapping

# A newer torch warns about the second name; an older torch knows only that name.
OLD_NAMES = {
    "TORCH_FR_BUFFER_SIZE": "TORCH_NCCL_TRACE_BUFFER_SIZE",
    "TORCH_FR_DUMP_TEMP_FILE": "TORCH_NCCL_DEBUG_INFO_TEMP_FILE",
}
_RING_ENTRIES = "2000"


def arm_flight_recorder(environ: "MutableMapping[str, str]", folder: str) -> None:
    """Set its variables; a variable that the user has set, under either name, stays."""
    prefix = os.path.join(folder, layout.FLIGHT_PREFIX)
    for name, value in (
        ("TORCH_FR_BUFFER_SIZE", _RING_ENTRIES),
        ("TORCH_FR_DUMP_TEMP_FILE", prefix),
        ("TORCH_NCCL_DUMP_ON_TIMEOUT", "1"),
        # With stack traces, torch waits for the GIL while it dumps: a rank that holds the GIL would
        # have no dump, or would hang in the dump.
        ("TORCH_INCLUDE_STACK_TRACE", "False"),
    ):
        if OLD_NAMES.get(name, name) not in environ:
            environ.setdefault(name, value)
