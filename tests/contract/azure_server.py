"""A real Azure Blob server process on a free port of loopback, with one container: Azurite.

It is a program of Node's. `make test-all` installs it where npm is; one on the PATH will do, too.
Without either, nothing is tested of Azure.
"""

import base64
import hashlib
import hmac
import re
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from email.utils import formatdate
from pathlib import Path

from tests.waiting import until

CONTAINER = "checkpoints"
_INSTALLED = Path(sys.prefix, "azurite", "node_modules", ".bin")
PROGRAM = shutil.which("azurite-blob", path=_INSTALLED) or shutil.which("azurite-blob")
WHY_NOT = "there is no azurite-blob: make test-all installs it where npm is"
_ACCOUNT = "devstoreaccount1"
# Known to everybody: Azurite has no other.
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="


@contextmanager
def azure_server(folder: Path) -> Generator[dict[str, str]]:
    """The environment in which the container can be used."""
    assert PROGRAM is not None
    said = folder / "said"
    with said.open("w") as out:
        process = subprocess.Popen(
            [
                *(PROGRAM, "--blobPort", "0", "--inMemoryPersistence", "--silent"),
                *("--disableTelemetry", "--skipApiVersionCheck"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            cwd=folder,
        )
    try:
        found = until(
            lambda: re.search(r"listens on (\S+)", said.read_text()),
            "the Azure server says where it listens",
        )
        url = f"{found[1]}/{_ACCOUNT}"
        _make_container(url)
        yield {
            "AZURE_ENDPOINT": url,
            "AZURE_ALLOW_HTTP": "true",
            "AZURE_STORAGE_ACCOUNT_NAME": _ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": _KEY,
        }
    finally:
        process.kill()
        process.wait()


def _make_container(url: str) -> None:
    import httpx2

    marks = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    said = "".join(f"{name}:{value}\n" for name, value in marks.items())
    meant = "PUT" + 12 * "\n" + f"{said}/{_ACCOUNT}/{_ACCOUNT}/{CONTAINER}\nrestype:container"
    proof = hmac.new(base64.b64decode(_KEY), meant.encode(), hashlib.sha256).digest()
    made = httpx2.put(
        f"{url}/{CONTAINER}?restype=container",
        headers={
            **marks,
            "Authorization": f"SharedKey {_ACCOUNT}:{base64.b64encode(proof).decode()}",
        },
        timeout=30,
    )
    assert made.status_code == 201, made.text
