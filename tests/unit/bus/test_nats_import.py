"""A process on the bus does not pay for the import of aiohttp, and can import it afterwards."""

import subprocess
import sys

import pytest

LOADED = """
import sys
import everstep.bus
print("aiohttp" in sys.modules)
import aiohttp.web
print(aiohttp.ClientSession.__name__)
"""


def test_aiohttp_is_not_imported_with_the_bus() -> None:
    pytest.importorskip("aiohttp")
    done = subprocess.run(
        [sys.executable, "-c", LOADED], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == ["False", "ClientSession"]
