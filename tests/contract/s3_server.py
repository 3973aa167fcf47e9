"""A real S3 server process on a free port of loopback, with one bucket."""

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from tests.waiting import until

BUCKET = "checkpoints"
_MOTO = """
import sys, threading
from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import make_server

app = moto = DomainDispatcherApplication(create_backend_app)
"""
# One request at a time: moto looks and then writes, which is atomic only so, as it is in S3.
_SERVE = """
server = make_server("127.0.0.1", 0, app)
threading.Thread(target=server.serve_forever, daemon=True).start()
sys.stdout.write("%d\\n" % server.port)
sys.stdout.flush()
sys.stdin.read()
"""


@contextmanager
def s3_server(folder: Path, before_moto: str = "") -> Generator[dict[str, str]]:
    """The environment in which the bucket can be used."""
    with served(folder, before_moto) as url:
        make_bucket(url, BUCKET)
        yield {
            "AWS_ENDPOINT_URL": url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
        }


@contextmanager
def served(folder: Path, before_moto: str = "") -> Generator[str]:
    """The URL of moto, or of the `app` that stands before it; nobody is left of it at the end."""
    said = folder / "port"
    with said.open("w") as out, (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", _MOTO + before_moto + _SERVE],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=log,
            env=os.environ | {"S3_UPLOAD_PART_MIN_SIZE": "1"},
        )
    try:
        port = until(said.read_text, "the server says where it listens", holds=str.strip)
        yield f"http://127.0.0.1:{port.strip()}"
    finally:
        process.kill()
        process.wait()
        assert process.stdin is not None
        process.stdin.close()


def make_bucket(url: str, name: str) -> None:
    import httpx2

    assert httpx2.put(f"{url}/{name}", timeout=30).status_code == 200
