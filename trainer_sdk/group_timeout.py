"""How long torch's default process group lets a collective take, as people are shown it."""

import sys


def group_timeout_ns() -> int | None:
    """That of its least patient backend; None where there is no group. It imports nothing."""
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if distributed is None:
        return None
    try:
        group = distributed._get_default_group()  # noqa: SLF001 - torch has no public way
        backends = [group._get_backend(device) for device in group._device_types]  # noqa: SLF001
        timeouts = [backend.options._timeout for backend in backends]  # noqa: SLF001
        return int(min(timeouts).total_seconds() * 1_000_000_000)
    except Exception:  # noqa: BLE001 - no group, or another release: it is only shown to people
        return None
