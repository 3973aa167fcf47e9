"""`everstep export` and `everstep serve --bundle`: a job's history on another machine."""

import json
import os
import signal
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
import zstandard

from everstep_services.cli.errors import Exit
from tests.integration.history.served_story import Run, ServedStory
from tests.unit.history.story import INCIDENT, JOB

_WITHIN_S = 60


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedStory]:
    with ServedStory(tmp_path_factory.mktemp("served")) as served:
        yield served


def started(bundle: Path, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "everstep_services.cli", "serve", "--bundle", str(bundle),
         *arguments],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip


@contextmanager
def served(bundle: Path) -> Iterator[dict[str, Any]]:
    """A server that is stopped by Ctrl-C, and what it printed."""
    process = started(bundle, "-o", "jsonl")
    try:
        assert process.stdout is not None
        yield json.loads(process.stdout.readline())
    finally:
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=_WITHIN_S)
    assert process.returncode == 0, errors


def test_a_bundle_is_served_with_pages_and_leaves_nothing(run: Run, tmp_path: Path) -> None:
    """A11.2: history survives the loss of everything else."""
    bundle = tmp_path / "job.everstep"
    code, out, err = run("export", JOB, "--to", str(bundle))
    assert (code, out.startswith(f"{bundle}: ")) == (0, True), err
    assert stat.S_IMODE(bundle.stat().st_mode) == 0o600
    before = bundle.read_bytes()
    with (
        served(bundle) as told,
        httpx2.Client(base_url=told["url"], follow_redirects=True) as browser,
    ):
        assert JOB in browser.get(told["link"]).text
        assert JOB in browser.get(f"/jobs/{JOB}").text
        assert browser.get(f"/incidents/{INCIDENT}").status_code == 200
    assert not Path(told["token_file"]).parent.exists()
    assert bundle.read_bytes() == before


def test_strangers_see_nothing_of_a_bundle_and_nobody_changes_it(run: Run, tmp_path: Path) -> None:
    """A13.1."""
    bundle = tmp_path / "job.everstep"
    assert run("export", JOB, "--to", str(bundle))[0] == 0
    with (
        served(bundle) as told,
        httpx2.Client(base_url=told["url"], follow_redirects=True) as stranger,
    ):
        assert JOB not in stranger.get("/").text
        assert stranger.get("/api/v1/jobs").status_code == 401
        bearer = {"Authorization": f"Bearer {Path(told['token_file']).read_text().strip()}"}
        jobs = stranger.get("/api/v1/jobs", headers=bearer).json()["items"]
        assert [job["job"] for job in jobs] == [JOB]
        stop = stranger.post(f"/api/v1/jobs/{JOB}:stop", headers=bearer, json={"reason": "x"})
        assert stop.status_code == 403


def test_a_file_that_exists_is_not_written_over(run: Run, tmp_path: Path) -> None:
    bundle = tmp_path / "there"
    bundle.write_text("mine")
    code, _, err = run("export", JOB, "--to", str(bundle))
    assert code != 0
    assert "exists already" in err
    assert bundle.read_text() == "mine"


def test_what_cannot_name_a_job_is_refused_before_anything_is_asked(run: Run) -> None:
    for command in ("why", "goodput", "export", "job show", "incidents"):
        code, out, err = run(*command.split(), f"{JOB}/rounds")
        assert (code, out) == (Exit.USAGE, ""), command
        assert "cannot name a job" in err
    assert not list(Path.cwd().glob("*rounds*"))


def test_an_unknown_job_leaves_no_file(run: Run, tmp_path: Path) -> None:
    bundle = tmp_path / "new"
    code, _, err = run("export", "nobody", "--to", str(bundle))
    assert code == Exit.NOT_FOUND
    assert "nobody" in err
    assert not bundle.exists()


def foreign_database() -> bytes:
    """Another program's."""
    with sqlite3.connect(":memory:") as database:
        database.execute("CREATE TABLE mine (one)")
        return database.serialize()


def damaged_bundle() -> bytes:
    """One byte is another than the one that was packed."""
    packed = bytearray(zstandard.ZstdCompressor(write_checksum=True).compress(foreign_database()))
    packed[-1] ^= 1
    return bytes(packed)


@pytest.mark.parametrize(
    "content",
    [None, b"", b"not a bundle", zstandard.compress(foreign_database()), damaged_bundle()],
)
def test_what_is_not_a_bundle_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    bundle = tmp_path / "bad.everstep"
    if content is not None:
        bundle.write_bytes(content)
    process = started(bundle)
    _, errors = process.communicate(timeout=_WITHIN_S)
    assert process.returncode not in {0, None}
    assert len(errors.strip().splitlines()) == 1, errors
    assert str(bundle) in errors
