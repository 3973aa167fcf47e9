"""Writes what is installed as a bill of materials, and looks for known flaws in it.

    python tools/audit.py VENV OUT

OUT is CycloneDX in JSON. The exit code is 1 when a package has a known flaw, and also when the
package index has no list of flaws for some of them: then nobody knows. pip-audit is installed into
a folder of its own in VENV.
"""

import json
import subprocess
import sys
import uuid
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Any

OURS = "everstep"
_PIP_AUDIT = "pip-audit>=2.9,<3"
_NAMED_MOST = 10


def materials(installed: Iterable[Distribution], now: datetime) -> dict[str, Any]:
    """The bill of materials: each package with its version and licence."""
    found = {d.name.lower(): d for d in installed}
    components = [_component(found[name]) for name in sorted(found) if name != OURS]
    about: dict[str, Any] = {"timestamp": now.isoformat()}
    if OURS in found:
        about["component"] = {"type": "application", "name": OURS, "version": found[OURS].version}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid4()}",
        "version": 1,
        "metadata": about,
        "components": components,
    }


def verdict(dependencies: Sequence[Mapping[str, Any]]) -> list[str]:
    """What pip-audit found, in lines; empty where each package was looked up and has no flaw."""
    flaws = [
        f"{package['name']} {package['version']}: {flaw['id']}, fixed in "
        f"{', '.join(flaw['fix_versions']) or 'no release'}"
        for package in dependencies
        for flaw in package.get("vulns", ())
    ]
    unknown = sorted(one["name"] for one in dependencies if "skip_reason" in one)
    unknown = [name for name in unknown if name != OURS]
    if unknown:
        named = ", ".join(unknown[:_NAMED_MOST]) + (", …" if len(unknown) > _NAMED_MOST else "")
        flaws.append(
            f"{len(unknown)} of {len(dependencies)} packages could not be looked up, as the index "
            f"has no list of flaws for them; run it where https://pypi.org answers: {named}"
        )
    return flaws


def _component(package: Distribution) -> dict[str, Any]:
    name, about = package.name.lower(), package.metadata
    component: dict[str, Any] = {
        "type": "library",
        "name": name,
        "version": package.version,
        "purl": f"pkg:pypi/{name}@{package.version}",
    }
    licence, *_ = about.get_all("License-Expression") or about.get_all("License") or [""]
    if licence and "\n" not in licence:
        component["licenses"] = [{"license": {"name": licence}}]
    return component


def _audited(venv: Path, packages: Path) -> Sequence[Mapping[str, Any]]:
    tool = venv / "audit" / "bin"
    if not (tool / "pip-audit").exists():
        subprocess.run([sys.executable, "-m", "venv", tool.parent], check=True)
        pip = [str(tool / "python"), "-m", "pip", "--disable-pip-version-check", "--no-input"]
        subprocess.run([*pip, "-qq", "install", _PIP_AUDIT], check=True)
    command = [str(tool / "pip-audit"), "--path", str(packages), "--skip-editable", "-f", "json"]
    answer = subprocess.run(  # its summary knows nothing of packages that it could not look up
        [*command, "--progress-spinner", "off"], capture_output=True, check=False
    )
    return dependencies(answer.stdout, answer.stderr)


def dependencies(out: bytes, complaints: bytes) -> Sequence[Mapping[str, Any]]:
    """The packages that pip-audit has looked for; exits with its last line if it found none out."""
    try:
        found: Sequence[Mapping[str, Any]] = json.loads(out)["dependencies"]
    except ValueError:
        last = (complaints.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise SystemExit(f"pip-audit could not look the packages up: {last}") from None
    return found


def main(arguments: Sequence[str]) -> int:
    venv, out = map(Path, arguments)
    (packages,) = (venv / "lib").glob("python3*/site-packages")
    bill = materials(distributions(path=[str(packages)]), datetime.now(UTC))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(bill, indent=1) + "\n")
    print(f"{out} has the {len(bill['components'])} packages that are installed")
    lines = verdict(_audited(venv, packages))
    for line in lines:
        print(line)
    if not lines:
        print("no package in it has a known flaw")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
