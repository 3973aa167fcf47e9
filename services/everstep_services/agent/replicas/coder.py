"""States in parts: any `needed` parts restore one. A process of its own makes and reads them.

With one part more than needed the code is XOR, in numpy; with more it is Reed-Solomon, by
pyeclib (the extra `ec`).
"""

import asyncio
import hashlib
import shutil
import sys
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
from msgspec.structs import replace

from everstep.errors import EverstepError
from everstep_services.agent.replicas.erasure_code import CodeResult, Decode, Encode, Request
from everstep_services.agent.replicas.images import CopyFile, Image
from everstep_services.agent.replicas.transfer.protocol import Copy

_CHILD = "everstep_services.agent.replicas.erasure_code"


class CodingError(EverstepError):
    """Parts could not be made, or do not restore a state."""


class Coder:
    """Makes the parts of a state once, and keeps them while any of them is being sent."""

    def __init__(self, base: Path) -> None:
        self._base = base
        self._users: Counter[Path] = Counter()
        self._locks: dict[Path, asyncio.Lock] = {}
        self._made: dict[Path, list[CopyFile]] = {}

    @asynccontextmanager
    async def parts(
        self, image: Image, copy: Copy, needed: int, parts: int
    ) -> AsyncIterator[list[CopyFile]]:
        """All parts, until the last user is done with them. Raises `CodingError`."""
        folder = self._base / f"rank-{copy.rank}-{_token(copy)}"
        self._users[folder] += 1
        try:
            async with self._locks.setdefault(folder, asyncio.Lock()):
                if folder not in self._made:
                    self._made[folder] = await self._make(image, copy, needed, parts, folder)
            yield self._made[folder]
        finally:
            self._users[folder] -= 1
            if not self._users[folder]:
                del self._users[folder], self._locks[folder]
                self._made.pop(folder, None)
                await asyncio.shield(asyncio.to_thread(_remove, folder))

    async def _make(
        self, image: Image, copy: Copy, needed: int, parts: int, folder: Path
    ) -> list[CopyFile]:
        await asyncio.to_thread(folder.mkdir, mode=0o700, parents=True, exist_ok=True)
        paths = [folder / f"part-{number}" for number in range(parts)]
        asked = Encode(
            needed=needed,
            parts=parts,
            image=str(image.path),
            size_bytes=copy.size_bytes,
            paths=tuple(map(str, paths)),
        )
        made = await _run(asked)
        return [
            CopyFile(
                replace(
                    copy, part=number, parts=parts, parts_needed=needed,
                    size_bytes=size_bytes, hash=hashed,
                ),
                path,
            )
            for number, (path, size_bytes, hashed) in enumerate(
                zip(paths, made.sizes_bytes, made.hashes, strict=True)
            )
        ]  # fmt: skip


async def give_back(parts: Sequence[CopyFile], size_bytes: int, image: Path) -> str:
    """Restore a state from enough parts into a file; return its hash. Raises `CodingError`."""
    first = parts[0].copy
    asked = Decode(
        needed=first.parts_needed,
        parts=first.parts,
        numbers=tuple(part.copy.part for part in parts),
        paths=tuple(str(part.path) for part in parts),
        image=str(image),
        size_bytes=size_bytes,
    )
    return (await _run(asked)).hashes[0]


async def _run(request: Request) -> CodeResult:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", _CHILD,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        out, error = await child.communicate(msgspec.json.encode(request))
    except BaseException:
        if child.returncode is None:
            child.kill()
        await asyncio.shield(child.wait())
        raise
    if child.returncode:
        lines = error.decode(errors="replace").strip().splitlines() or ["it said nothing"]
        raise CodingError(f"parts could not be made or read: {lines[-1]}")
    return msgspec.json.decode(out, type=CodeResult)


def _token(copy: Copy) -> str:
    return hashlib.blake2b(f"{copy.step} {copy.hash}".encode(), digest_size=8).hexdigest()


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
