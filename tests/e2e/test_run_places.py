"""Where an agent runs: as which user, and at which address of the host."""

import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e import failure_logs
from tests.e2e.cluster import Cluster
from tests.e2e.processes import ROOT, SCRIPTS, Process, environment, kill_all, python, tagged
from tests.waiting import until

NOWHERE = "203.0.113.7"
"""Of a network that is for documentation only: no host has it."""
USERS = (61_001, 61_002)
READ = tuple(dict.fromkeys(str(path) for path in (sys.base_prefix, sys.prefix, ROOT)))
"""What a user has to read to run a job: the interpreter, what is installed, these sources."""


def test_an_address_of_no_interface_is_refused_at_once(cluster: Cluster) -> None:
    """One line names the addresses that there are (A2.7)."""
    agent = cluster.steady("--nnodes", "2", "--address", NOWHERE)
    assert agent.wait() == 2
    (line,) = agent.said.splitlines()
    assert f"no interface of this host has the address {NOWHERE}" in line
    assert "`ip address`" in line
    assert "127.0.0.1" in line, "which one reaches the bus"
    assert cluster.left() == []


@dataclass(frozen=True)
class User:
    """A user of this host, with a home, and nothing in it."""

    number: int
    home: Path

    def runs(self, job: str) -> Process:
        """A job with a bus of its own, as if the user were alone."""
        own = environment(self.home, job)
        for name in ("XDG_RUNTIME_DIR", "EVERSTEP_AGENT__CHECKPOINTS__MEMORY_DIR"):
            shutil.rmtree(own.pop(name))
        options = ("--job", job, "--node-id", "node-1", "--cold", "--nproc-per-node", "2")
        script = (str(SCRIPTS / "steady.py"), str(self.home))
        command = python("-m", "everstep_services.cli", "run", *options, *script)
        log = self.home.with_suffix(".log")
        return Process(self.having(command), own, log, cwd=self.home)

    def having(self, command: list[str]) -> list[str]:
        """The command, run by this user."""
        script = str(SCRIPTS / "as_user.py")
        return [*python(script, str(self.number), *READ, "--"), *command]

    @property
    def folders(self) -> list[Path]:
        """What the user's agents keep outside of the home."""
        bases = (Path("/dev/shm"), Path("/tmp"))
        return [base / f"everstep-{self.number}" for base in bases]


@pytest.fixture
def users() -> Iterator[list[User]]:
    if os.getuid() != 0:
        pytest.skip("only root may start processes of other users")
    homes = Path(tempfile.mkdtemp(prefix="everstep-test-homes-"))
    homes.chmod(0o755)
    users = [User(number, homes / str(number)) for number in USERS]
    try:
        for user in users:
            user.home.mkdir(mode=0o700)
            os.chown(user.home, user.number, user.number)
        probe = users[0].having(python("-c", "import everstep_services"))
        tried = subprocess.run(probe, cwd=homes, capture_output=True, text=True, check=False)
        if tried.returncode:
            pytest.skip(f"other users cannot run this interpreter here: {tried.stderr[-500:]}")
        with failure_logs.shared("users", homes):
            yield users
    finally:
        for user in users:
            for folder in user.folders:
                shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(homes)


def is_nobody_else(user: User, pid: int) -> None:
    """It has the user's rights, and no more."""
    status = dict(
        line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
    )
    assert set(status["Uid"].split()) == set(status["Gid"].split()) == {str(user.number)}
    assert status["Groups"].split() == []
    assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0


def test_jobs_of_the_same_name_of_two_users_do_not_touch_each_other(
    users: list[User], job: str
) -> None:
    """Each user's folders are their own, with mode 0700 (A2.8, A13.4)."""
    processes = [user.runs(job) for user in users]
    try:
        for user in users:
            until((user.home / "step").exists, "it makes steps")
        for user, process in zip(users, processes, strict=True):
            is_nobody_else(user, process.pid)
            kept = [folder for folder in user.folders if folder.exists()]
            assert kept, "sockets and pages of agents that run"
            for folder in kept:
                about = folder.stat()
                assert (about.st_uid, stat.S_IMODE(about.st_mode)) == (user.number, 0o700)
            (user.home / "end").touch()
        codes = [process.wait() for process in processes]
        assert codes == [0, 0], [process.said for process in processes]
    finally:
        for process in processes:
            process.kill()
            print(process.said)  # for a test that failed
        kill_all(tagged(job))
