"""Builds what a release consists of from the last commit, twice, and compares the bytes.

    python -m tools.dist

`dist/` gets the wheel, the sdist, a bill of materials (CycloneDX: what `everstep[all]` brings, in
the versions that are installed here) and the hashes of all three. Times in the archives are that of
the commit. Exit code 1 if two builds differ.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

from tools.audit import OURS, materials

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"


def commit() -> tuple[str, int]:
    """The last one, and when it was made."""
    name, epoch = _git("log", "-1", "--format=%H %ct").split()
    return name, int(epoch)


def build(name: str, epoch: int, folder: Path) -> list[Path]:
    """The wheel and the sdist of a commit, made from its files alone."""
    source, out = folder / "source", folder / "dist"
    source.mkdir(parents=True)
    archive = subprocess.run(
        ["git", "-C", ROOT, "archive", name], check=True, stdout=subprocess.PIPE
    )
    subprocess.run(["tar", "-x", "-C", source], input=archive.stdout, check=True)
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(out)]
    timed = ["env", f"SOURCE_DATE_EPOCH={epoch}", *command]
    subprocess.run(timed, cwd=source, check=True, stdout=subprocess.DEVNULL)
    return sorted(out.iterdir())


def bill(wheel: Path, epoch: int) -> str:
    """The bill of materials of `everstep[all]`, the same for the same wheel and environment."""
    installed = list(_closure([Requirement(f"{OURS}[all]")], set()))
    content = materials(installed, datetime.fromtimestamp(epoch, UTC))
    digest = sha256(wheel.read_bytes()).hexdigest()
    content["metadata"]["component"]["hashes"] = [{"alg": "SHA-256", "content": digest}]
    content["metadata"]["component"]["version"] = wheel.name.split("-")[1]
    del content["serialNumber"]
    name = json.dumps(content, sort_keys=True)
    content["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, name)}"
    return json.dumps(content, indent=1, sort_keys=True) + "\n"


def _closure(needs: Sequence[Requirement], seen: set[str]) -> Iterator[Distribution]:
    """What is installed of these requirements, and of theirs."""
    for need in needs:
        key = re.sub(r"[-_.]+", "-", str(need).partition(";")[0].lower())
        if key in seen:
            continue
        seen.add(key)
        try:
            package = distribution(need.name)
        except PackageNotFoundError:
            raise SystemExit(f"{need} is not installed here: make dist installs it") from None
        yield package
        below = [Requirement(text) for text in package.requires or ()]
        yield from _closure([each for each in below if _applies(each, need.extras)], seen)


def _applies(need: Requirement, extras: set[str]) -> bool:
    return need.marker is None or any(
        need.marker.evaluate({"extra": extra}) for extra in ("", *extras)
    )


def main() -> int:
    name, epoch = commit()
    if _git("status", "--porcelain", "--untracked-files=no"):
        print(f"what is not committed is not in it: this builds {name}")
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        built = build(name, epoch, Path(first))
        again = build(name, epoch, Path(second))
        pairs = zip(built, again, strict=True)
        differ = [a.name for a, b in pairs if a.read_bytes() != b.read_bytes()]
        if differ:
            print(f"two builds of {name} differ: {', '.join(differ)}")
            return 1
        DIST.mkdir(exist_ok=True)
        made = [Path(shutil.copy(path, DIST)) for path in built]
    (wheel,) = (path for path in made if path.suffix == ".whl")
    made.append(DIST / f"{OURS}-{wheel.name.split('-')[1]}.cdx.json")
    made[-1].write_text(bill(wheel, epoch))
    sums = [f"{sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(made)]
    (DIST / "SHA256SUMS").write_text("".join(sums))
    print("".join(sums), end="")
    return 0


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
