"""`import nvidia_resiliency_ext` finds our modules where NVRx is missing, and else NVRx's."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_sdk import layout
from trainer_sdk.nvrx import VERSION, aliases

WITHIN_S = 120.0
LIGHT = sorted(
    name for name, ours in aliases.MODULES.items()
    if ours in {"", "fault_tolerance", "timeouts", "logs", "inject_fault"}
)  # fmt: skip


def python(code: str, *folders: Path | str, stand_in: str = "missing") -> tuple[str, str]:
    """What a process of its own prints, with these folders before all others."""
    environ = dict(os.environ)
    environ["PYTHONPATH"] = os.pathsep.join(map(str, folders))
    environ[layout.STAND_IN_VARIABLE] = stand_in
    done = subprocess.run(
        [sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=WITHIN_S,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr.strip()


def installed(folder: Path) -> Path:
    """A folder with a package that is NVRx for the purposes of the import system."""
    package = folder / "there" / aliases.PACKAGE
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("__version__ = '9.9'\n")
    (package / "own.py").write_text("name = 'own'\n")
    about = folder / "there" / "nvidia_resiliency_ext-9.9.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Name: nvidia-resiliency-ext\nVersion: 9.9\n")
    return folder / "there"


def test_the_light_modules_are_found_without_torch() -> None:
    imports = "; ".join(f"import {aliases.PACKAGE}.{name}" for name in LIGHT)
    code = f"{imports}; import sys; print({aliases.PACKAGE}.__version__, 'torch' in sys.modules)"
    assert python(code, aliases.FOLDER) == (f"{VERSION} False", "")


def test_names_are_ours() -> None:
    code = (
        "from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient as one;"
        "import nvidia_resiliency_ext.fault_tolerance.rank_monitor_client as module;"
        "import trainer_sdk.nvrx as ours;"
        "import pickle; assert pickle.loads(pickle.dumps(one)) is one;"
        "print(one is ours.RankMonitorClient is module.RankMonitorClient)"
    )
    assert python(code, aliases.FOLDER) == ("True", "")


def test_a_module_without_counterpart_is_not_found_and_the_remedy_is_named() -> None:
    code = """
for name in ("inprocess.utils", "attribution.trace_analyzer.fr_attribution",
             "fault_tolerance.launcher", "nothing.at_all"):
    try:
        __import__(f"nvidia_resiliency_ext.{name}")
    except ModuleNotFoundError as error:
        print(error)
"""
    lines = python(code, aliases.FOLDER)[0].splitlines()
    assert len(lines) == 4
    assert all("has no counterpart in Everstep: " in line for line in lines)
    assert "everstep fr analyze" in lines[1]
    assert "everstep run" in lines[2]


def test_the_real_one_is_used_where_it_is_installed_and_one_line_says_so(tmp_path: Path) -> None:
    there = installed(tmp_path)
    code = (
        "import nvidia_resiliency_ext as it; from nvidia_resiliency_ext import own;"
        "import nvidia_resiliency_ext.own; print(it.__version__, own.name)"
    )
    printed, said = python(code, aliases.FOLDER, there)
    assert printed == "9.9 own"
    assert said == (
        f"everstep: NVRx 9.9 is installed ({there / aliases.PACKAGE}), and its own modules are "
        "used; `everstep run --replace-nvrx` uses those of Everstep"
    )


def test_the_real_one_is_replaced_on_request(tmp_path: Path) -> None:
    code = "import nvidia_resiliency_ext as it; print(it.__version__)"
    there = installed(tmp_path)
    assert python(code, aliases.FOLDER, there, stand_in="always") == (VERSION, "")


@pytest.mark.parametrize("is_there", [False, True])
def test_one_import_does_the_same(tmp_path: Path, is_there: bool) -> None:
    """Also for the processes that the training starts, as data workers."""
    code = (
        "import trainer_sdk.nvrx.stand_in, nvidia_resiliency_ext as it, subprocess, sys;"
        "print(it.__version__, flush=True);"
        "subprocess.run([sys.executable, '-c', 'import nvidia_resiliency_ext as it;"
        "print(it.__version__)'], check=True)"
    )
    folders = [installed(tmp_path)] if is_there else []
    wanted = "9.9" if is_there else VERSION
    assert python(code, *folders, stand_in="")[0].splitlines() == [wanted, wanted]
