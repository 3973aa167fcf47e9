"""The release before, built from its commit: its packages come first on the path of a process."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from everstep import __version__
from tests.e2e.conftest import new_cluster
from tests.e2e.processes import ROOT

__all__ = ["new_cluster"]

LAST = tomllib.loads((ROOT / "tools" / "last_release.toml").read_text())
VERSIONS: Mapping[str, str] = {"old": LAST["version"], "new": __version__}
Releases = Mapping[str, Mapping[str, str]]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.chaos)
            item.add_marker(pytest.mark.timeout(400))


@pytest.fixture(scope="session")
def releases(tmp_path_factory: pytest.TempPathFactory) -> Releases:
    """The environment with which a process is of the `old` release or of the `new` one."""
    folder = tmp_path_factory.mktemp("release")
    source, site = folder / "source", folder / "site"
    source.mkdir()
    archive = subprocess.run(
        ["git", "-C", ROOT, "archive", LAST["commit"]], check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", source], input=archive.stdout, check=True)
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(build, cwd=source, check=True, capture_output=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archived:
        archived.extractall(site)
    _name(site / "everstep" / "__init__.py")
    return {
        "old": {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])},
        "new": {"PYTHONPATH": str(ROOT)},
    }


def _name(module: Path) -> None:
    """A commit before a release has the release's version already: tests tell them apart by it."""
    text = module.read_text()
    module.write_text(
        re.sub(r'(?m)^__version__ = ".*"$', f'__version__ = "{LAST["version"]}"', text)
    )
