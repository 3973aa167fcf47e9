"""The timeout of collectives in torch's default process group; it is only displayed."""

import sys


def group_timeout_ns() -> int | None:
    """The shortest timeout of the group's backends; None without a group. Imports nothing."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None:
        return None
    try:
        group = distributed._get_default_group()  # noqa: SLF001 - torch has no public way
        backends = [group._get_backend(device) for device in group._device_types]  # noqa: SLF001
        timeouts = [backend.options._timeout for backend in backends]  # noqa: SLF001
        return int(min(timeouts).total_seconds() * 1_000_000_000)
    except Exception:  # noqa: BLE001 - no group, or another release of torch
        return None
