"""What `import trainer_sdk` brings into a training process: next to nothing."""

import importlib.util
import json
import subprocess
import sys

import pytest

HEAVY = [
    *["torch", "numpy", "nats", "pydantic", "sqlalchemy", "fastapi", "starlette", "uvicorn"],
    *["click", "rich", "httpx2", "prometheus_client", "psutil", "zstandard"],
]
MOST_MODULES = 120
"""More than a bare interpreter has. msgspec alone brings 59; asyncio would bring 100."""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-I", *arguments], capture_output=True, text=True, check=True, timeout=30
    )


def loaded_by(statement: str) -> set[str]:
    """The modules of a fresh interpreter after a statement."""
    program = f"{statement}; import json, sys; print(json.dumps(list(sys.modules)))"
    modules: list[str] = json.loads(run("-c", program).stdout)
    return set(modules)


def imports_of(statement: str) -> int:
    """How many modules Python reports as imported by a statement, itself included."""
    return run("-X", "importtime", "-c", statement).stderr.count("import time:")


@pytest.mark.parametrize("name", HEAVY)
def test_what_must_not_be_loaded_is_installed_here(name: str) -> None:
    assert importlib.util.find_spec(name) is not None, "so that the next test can fail"


def test_importing_the_sdk_loads_nothing_heavy() -> None:
    """Neither torch nor a client of NATS is imported (A1.1)."""
    loaded = loaded_by("import trainer_sdk")
    assert "trainer_sdk" in loaded
    roots = {name.partition(".")[0] for name in loaded}
    assert not roots & {*HEAVY, "everstep_services", "asyncio", "concurrent", "multiprocessing"}
    assert not loaded & {"everstep.bus", "everstep.store", "everstep.runtime", "everstep.observe"}


def test_importing_the_sdk_loads_few_modules() -> None:
    # A count, not a time: the same on every machine. benchmarks/sdk_import.py has the time.
    more = imports_of("import trainer_sdk") - imports_of("pass")
    assert more <= MOST_MODULES


def test_importing_the_sdk_starts_no_thread_and_prints_nothing() -> None:
    done = run("-c", "import trainer_sdk, threading; assert threading.active_count() == 1")
    assert done.stdout == ""
    assert done.stderr == ""
