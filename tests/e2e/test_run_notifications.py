"""Messages to people about runs that have bus and services of their own."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.e2e.processes import Process, environment, kill_all, python, tagged

STARTS = 3
"""On a machine that is far too busy, history opens after the run: then the next start sends."""


@contextmanager
def receiver(failed: list[str]) -> Iterator[str]:
    """A webhook that notes which jobs have failed."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            message = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if message["event"] == "job_failed":
                failed.append(message["job"])
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


def test_a_job_that_fails_at_once_in_a_new_state_directory_is_reported(
    tmp_path: Path, job: str
) -> None:
    """Its end may be older than the first time that history reads facts (A11.5)."""
    script, failed = tmp_path / "fails.py", list[str]()
    script.write_text("raise SystemExit(3)\n")
    with receiver(failed) as url:
        environ = environment(tmp_path, job, EVERSTEP_NOTIFY__WEBHOOK__URL=url)
        try:
            for number in range(STARTS):
                name = job if not number else f"{job}-{number}"
                command = (
                    "run", "--state-dir", str(tmp_path / "state"), "--job", name,
                    "--max-restarts", "0", "--cold", str(script),
                )  # fmt: skip
                log = tmp_path / f"{number}.log"
                run = Process(python("-m", "everstep_services.cli", *command), environ, log)
                assert run.wait(120) == 1, run.said
                if job in failed:
                    break
        finally:
            kill_all(tagged(job))
    assert failed.count(job) == 1
