"""Messages to people about runs that have bus and services of their own."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.e2e.processes import Process, environment, kill_all, python, tagged
from tests.waiting import until

STARTS = 3
"""On a machine that is far too busy, history opens after the run: then the next start sends."""


@contextmanager
def receiver(messages: list[dict[str, Any]]) -> Iterator[str]:
    """A webhook that keeps what it gets."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            messages.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
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
    script, messages = tmp_path / "fails.py", list[dict[str, Any]]()

    def failed() -> list[str]:
        return [told["job"] for told in messages if told["event"] == "job_failed"]

    script.write_text("raise SystemExit(3)\n")
    with receiver(messages) as url:
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
                if job in failed():
                    break
        finally:
            kill_all(tagged(job))
    assert failed().count(job) == 1


STANDS = """
import sys, time, trainer_sdk
from pathlib import Path

run = trainer_sdk.session()
run.step()
with run.section("data"):
    while not Path(sys.argv[1]).exists():
        time.sleep(0.02)
run.step()
while not Path(sys.argv[2]).exists():
    time.sleep(0.02)
"""


def test_a_stall_that_is_only_watched_is_told_when_it_is_found_and_when_it_ends(
    tmp_path: Path, job: str
) -> None:
    script, go_on, end = (tmp_path / name for name in ("stands.py", "go-on", "end"))
    script.write_text(STANDS)
    messages = list[dict[str, Any]]()
    with receiver(messages) as url:
        environ = environment(tmp_path, job, EVERSTEP_NOTIFY__WEBHOOK__URL=url)
        command = (
            "run", "--state-dir", str(tmp_path / "state"), "--job", job, "--cold",
            "--no-restart-on-stall", "--limit", "data=5", str(script), str(go_on), str(end),
        )  # fmt: skip
        try:
            run = Process(
                python("-m", "everstep_services.cli", *command), environ, tmp_path / "0.log"
            )
            until(lambda: messages, "the stall is told", within_s=120)
            go_on.touch()
            until(lambda: len(messages) == 2, "its end is told", within_s=120)
            end.touch()
            assert run.wait(120) == 0, run.said
        finally:
            kill_all(tagged(job))
    first, last = messages
    assert (first["state"], last["state"]) == ("firing", "resolved")
    *_, done = first["text"].splitlines()
    assert done == "Done: nothing: stalls are only observed, and the round goes on"
    assert (last["outcome"], last["lost_steps"]) == ("recovered", 0)
    assert [told["text"].count("rank 0 has made no progress") for told in messages] == [1, 1]
    assert "End: rank 0 moves again after " in last["text"]


WRONG = """
import sys, time, torch, trainer_sdk
from pathlib import Path

run, wrong = trainer_sdk.session(), [float("nan")]
numerics = run.numerics({"model": torch.nn.Linear(1, 1)}, range(9), mode="validate_results")
for number in numerics:
    is_wrong = number == 4
    loss = numerics.compute(lambda _: wrong.pop() if is_wrong and wrong else 1.0, number)
    if numerics.accepts(loss=loss):
        run.step()
while not Path(sys.argv[1]).exists():
    time.sleep(0.02)
"""


def test_a_result_that_cannot_be_right_is_told_with_its_judgement(tmp_path: Path, job: str) -> None:
    """It was over before its message was sent, so there is a single one."""
    script, end = tmp_path / "wrong.py", tmp_path / "end"
    script.write_text(WRONG)
    messages = list[dict[str, Any]]()
    with receiver(messages) as url:
        environ = environment(tmp_path, job, EVERSTEP_NOTIFY__WEBHOOK__URL=url)
        command = (
            "run", "--state-dir", str(tmp_path / "state"), "--job", job, "--cold",
            str(script), str(end),
        )  # fmt: skip
        try:
            run = Process(
                python("-m", "everstep_services.cli", *command), environ, tmp_path / "0.log"
            )
            until(lambda: messages, "the result is told", within_s=120)
            end.touch()
            assert run.wait(120) == 0, run.said
        finally:
            kill_all(tagged(job))
    (told,) = messages
    assert (told["event"], told["state"], told["outcome"]) == ("incident", "resolved", "recovered")
    assert (told["ranks"], told["lost_steps"]) == ([0], 0)
    for sentence in (
        "at step 5 the loss or the gradient norm is not a number",
        "was not reproduced: loss nan, again 1 and 1",
        "the training made the step again",
    ):
        assert told["text"].count(sentence) == 1, told["text"]
