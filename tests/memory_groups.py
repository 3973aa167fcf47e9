"""A control group with little memory, for what the kernel does to ranks that want more."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from everstep.ids import new_id
from tests.waiting import until

_MOUNT = Path("/sys/fs/cgroup")
_LIMITS = {
    # for each version, where its groups are: the limit, and that nothing is swapped instead
    _MOUNT / "memory": ("memory.limit_in_bytes", {"memory.memsw.limit_in_bytes": "{most}"}),
    _MOUNT: ("memory.max", {"memory.swap.max": "0"}),
}


@contextmanager
def limited_group(most_mib: int) -> Iterator[Path]:
    """Its folder; skips the test where the kernel or our rights have none for us."""
    base = next((base for base in _LIMITS if base.is_dir()), _MOUNT)
    folder = base / f"everstep-test-{new_id()[12:]}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        _limit(folder, most_mib)
        yield folder
    finally:
        until(lambda: _removed(folder), "nobody is left in the group", despite=OSError)


def _limit(folder: Path, most_mib: int) -> None:
    limit, others = _LIMITS[folder.parent]
    most = str(most_mib << 20)
    try:
        (folder / limit).write_text(most)
        for name, value in others.items():
            if (folder / name).exists():
                (folder / name).write_text(value.format(most=most))
    except OSError as error:
        pytest.skip(f"the memory of a control group cannot be limited here: {error}")


def _removed(folder: Path) -> bool:
    folder.rmdir()
    return True
