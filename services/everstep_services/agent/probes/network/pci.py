"""Which GPUs and adapters of a node are near each other, from `/sys`; pure except for reading."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePath

_NVIDIA = "0x10de"
_DISPLAY = "0x03"
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def gpus(root: Path) -> dict[str, PurePath]:
    """The real folder of each NVIDIA GPU, by its PCI address, in NVML's order."""
    return {
        folder.name: folder.resolve()
        for folder in sorted((root / "sys/bus/pci/devices").glob("*"))
        if _says(folder / "vendor", _NVIDIA) and _says(folder / "class", _DISPLAY)
    }


def _says(path: Path, beginning: str) -> bool:
    try:
        return path.read_text().startswith(beginning)
    except OSError:
        return False


def nearest(
    gpus: Mapping[str, PurePath], adapters: Mapping[str, PurePath]
) -> dict[str, tuple[str, ...]]:
    """For each adapter, the GPUs to which no other adapter is nearer.

    Nearer means more shared bridges. A shared root complex alone does not count, and adapters
    that are equally near share the GPU.
    """
    served: dict[str, list[str]] = {name: [] for name in adapters}
    for gpu, place in gpus.items():
        shared = {name: _shared(place, adapter) for name, adapter in adapters.items()}
        most = max(shared.values(), default=0)
        for name, bridges in shared.items():
            if bridges == most > 0:
                served[name].append(gpu)
    return {name: tuple(near) for name, near in served.items()}


def _shared(place: PurePath, other: PurePath) -> int:
    pairs = zip(_bridges(place), _bridges(other), strict=False)
    count = 0
    for mine, theirs in pairs:
        if mine != theirs:
            break
        count += 1
    return count


def _bridges(place: PurePath) -> Iterator[str]:
    return (part for part in place.parts if _ADDRESS.fullmatch(part))


def served_by(name: str, near: Mapping[str, tuple[str, ...]], gpus: Sequence[str]) -> str:
    """For people: the GPUs that an adapter serves; empty if none is near."""
    indexes = ", ".join(str(gpus.index(gpu)) for gpu in near.get(name, ()))
    return f"; nearest to GPU {indexes}, as a rule of the same local rank" if indexes else ""
