"""The relevant environment variables of the ranks, and releases of the software that runs."""

import asyncio
import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import msgspec

from everstep import __version__
from everstep.clock import Clock
from everstep.observe.redaction import MASK, redact
from everstep_services.agent.collectors.collection import EvidenceFound, Scene

_TOLD = re.compile(
    r"(?:NCCL|TORCH|TORCHELASTIC|PYTORCH|GLOO|CUDA|NVIDIA|OMP|MKL|UCX|FI|MASTER|SLURM)_\w+"
    r"|(?:(?:LOCAL_|GROUP_|ROLE_)?(?:RANK|WORLD_SIZE))|CUBLAS_WORKSPACE_CONFIG|LD_PRELOAD"
    r"|PYTHON(?:HASHSEED|FAULTHANDLER|MALLOC|OPTIMIZE|UNBUFFERED)"
)
"""No other variable is stored: a training's environment has keys to everything."""
_SECRET = re.compile(r"(?i)token|passw|secret|credential|jwt|auth|_key\b|apikey|_pin$")
_VALUE_MOST = 400
_PACKAGES = ("torch", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "numpy", "triton")
_DRIVER_FILES = (Path("/proc/driver/nvidia/version"), Path("/sys/module/nvidia/version"))


async def environment(scene: Scene, clock: Clock) -> EvidenceFound | None:
    """The variables that all ranks share, once, and those of each rank."""
    del clock
    told = {rank: told_of(environ) for rank, environ in scene.environs.items()}
    first = next(iter(told.values()), {})
    shared = {
        name: value
        for name, value in first.items()
        if all(values.get(name) == value for values in told.values())
    }
    own = {
        rank: {name: value for name, value in values.items() if name not in shared}
        for rank, values in told.items()
    }
    versions = await asyncio.to_thread(releases, scene.python)
    document = {"versions": versions, "variables": shared, "ranks": own}
    named = ("everstep", "torch", "nccl", "python", "driver", "kernel")
    shown = (f"{name} {versions[name]}" for name in named if name in versions)
    count = len(shared) + sum(map(len, own.values()))
    return EvidenceFound(f"{', '.join(shown)}; {count} variables", msgspec.json.encode(document))


def told_of(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that may explain a failure; none of them is a secret."""
    return {
        name: MASK if _SECRET.search(name) else redact(value)[:_VALUE_MOST]
        for name, value in sorted(environ.items())
        if _TOLD.fullmatch(name)
    }


def releases(python: str) -> dict[str, str]:
    """The releases that run here; packages only if ranks run this process's interpreter."""
    versions = {"everstep": __version__, "kernel": os.uname().release}
    if not python or os.path.abspath(python) == os.path.abspath(sys.executable):
        versions["python"] = platform.python_version()
        for name in _PACKAGES:
            try:
                versions["nccl" if "nccl" in name else name] = metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
    else:
        versions["interpreter"] = python
    for path in _DRIVER_FILES:
        try:
            versions["driver"] = path.read_text().splitlines()[0][:200]
            break
        except (OSError, IndexError):
            continue
    return versions
