"""After `everstep run`, and while it writes, commands answer from the record on disk."""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from everstep_services.cli.errors import Exit
from tests.e2e.processes import Process, environment, python
from tests.waiting import WITHIN_S, until

SCRIPT = """import os, sys, time

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and os.environ["RANK"] == "1":
    raise ValueError("expected 8 classes, found 9")
print("rank", os.environ["RANK"], "runs")
while not os.path.exists(sys.argv[1]):
    time.sleep(0.05)
"""
ASKED = """import contextlib, io, json, sys
from everstep_services.cli.__main__ import main

for words in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    print(json.dumps([code, out.getvalue(), err.getvalue()]))
"""
"""Commands one after the other in a process, whose imports are those of all."""
ANSWERS = {
    ("jobs",): "first\tdone\t2\t1",
    ("why",): "ValueError: expected 8 classes, found 9",
    ("why", "first"): "verdict: user_code",
    ("incidents",): "\tfirst\t",
    ("job", "show", "first"): "first: done (exit code 0)",
    ("nodes",): "\tfirst\t",
    ("facts", "--kind", "job_ended"): "\tjob_ended\t",
    ("ckpt", "ls", "first"): "",
    ("stragglers", "first"): "",
    ("incident", "report", "first"): "ValueError",
}
RIGHTS = "-dac_override,-dac_read_search,-fowner"
"""Without them root, too, may only do what the modes of files allow."""


class Run:
    """One `everstep run` without a bus, and commands next to it."""

    def __init__(self, folder: Path, tag: str) -> None:
        self.state, self.gate = folder / "state", folder / "gate"
        late = {"EVERSTEP_ATTRIBUTION__QUIET_S": "3"}  # its job ends before attribution judges
        self.environ = environment(folder, tag, EVERSTEP_STATE_DIR=str(self.state), **late)
        script = folder / "train.py"
        script.write_text(SCRIPT)
        words = ("run", "--job", "first", "--cold", "--nproc-per-node", "2")
        command = python("-m", "everstep_services.cli", *words, str(script), str(self.gate))
        self.process = Process(command, self.environ, folder / "run.log", cwd=folder)

    def ask(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command as a user who may not write to the state directory."""
        return self._asked(python("-m", "everstep_services.cli", *words))

    def ask_all(self, *commands: Sequence[str]) -> Iterator[tuple[int, str, str]]:
        """Run commands as that user; the code and the output of each."""
        program = python("-c", ASKED, json.dumps(commands))
        done = self._asked(program, WITHIN_S * len(commands))
        assert done.returncode == 0, done.stderr
        return map(tuple, map(json.loads, done.stdout.splitlines()))

    def _asked(
        self, command: list[str], within_s: float = WITHIN_S
    ) -> subprocess.CompletedProcess[str]:
        if os.geteuid() == 0:
            command = ["setpriv", f"--bounding-set={RIGHTS}", *command]
        return subprocess.run(
            command, env=self.environ, capture_output=True, text=True, timeout=within_s, check=False
        )

    def files(self) -> dict[str, bytes]:
        """Everything in the state directory but the logs and the bus."""
        return {
            str(path.relative_to(self.state)): path.read_bytes()
            for path in self.state.rglob("*")
            if path.is_file() and path.relative_to(self.state).parts[0] not in {"logs", "nats"}
        }


@pytest.fixture
def run(tmp_path: Path, job: str) -> Iterator[Run]:
    """A run whose first round has failed, and whose second waits for the gate."""
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed: root may write everywhere")
    run = Run(tmp_path, job)
    try:
        yield run
    finally:
        run.process.kill()
        _set_modes(run.state, 0o700, 0o600)


def _set_modes(folder: Path, of_folders: int, of_files: int) -> None:
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink() and path.exists():
            path.chmod(of_folders if path.is_dir() else of_files)


def _recovered(run: Run) -> bool:
    done = run.ask("jobs")
    return "first\trunning\t2\t1" in done.stdout


def test_answers_come_from_the_record_when_nothing_runs_any_more(run: Run) -> None:
    """Nothing is written, nothing is created, and no rights to write are needed."""
    run.gate.touch()
    assert run.process.wait() == 0, run.process.said
    _set_modes(run.state, 0o500, 0o400)
    before = run.files()
    answers = run.ask_all(*ANSWERS)
    for (words, text), (code, out, err) in zip(ANSWERS.items(), answers, strict=True):
        assert code == Exit.OK, (words, err)
        assert text in out, (words, out)
        assert err.count("this is the record on disk, last written") == 1, err
    assert "rank 0 runs" in run.ask("logs", "first").stdout
    assert run.files() == before

    wanted = run.ask("jobs", "--api", "http://127.0.0.1:1")
    assert (wanted.returncode, "record on disk" in wanted.stderr) == (Exit.UNREACHABLE, False)
    stopped = run.ask("stop", "first")
    assert stopped.returncode == Exit.UNREACHABLE


@pytest.mark.variant
def test_answers_come_from_the_record_while_it_is_written(run: Run) -> None:
    """A user who may not ask the API of a run reads along with it."""
    token = run.state / "token"
    until(token.exists, "it has made its token")
    token.chmod(0)
    until(lambda: _recovered(run), "its second round is on record")
    done = run.ask("why")
    assert done.returncode == Exit.OK, done.stderr
    assert "ValueError: expected 8 classes, found 9" in done.stdout
    assert "this is the record on disk, last written" in done.stderr
    token.chmod(0o600)
    asked = run.ask("jobs")
    assert (asked.returncode, asked.stderr) == (Exit.OK, "")
    run.gate.touch()
    assert run.process.wait() == 0, run.process.said
    assert "first\tdone\t2\t1" in run.ask("jobs").stdout
