"""`everstep check` as a person, a Slurm prolog and a monitoring system run it."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.processes import Process, environment
from tests.waiting import until

EVERSTEP = [sys.executable, "-P", "-m", "everstep_services.cli"]
TOKEN = "0123456789abcdef0123456789abcdef"


def check(
    environ: Mapping[str, str], *arguments: str, cwd: Path | None = None
) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*EVERSTEP, "check", *arguments],
        env=dict(environ),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.fixture
def prolog(tmp_path: Path) -> dict[str, str]:
    """What a prolog of Slurm has: no home, hardly a path, and a place of the site's for state."""
    return {
        "PATH": "/usr/bin:/bin",
        "SLURM_JOB_ID": "7",
        "SLURMD_NODENAME": "n7",
        "EVERSTEP_STATE_DIR": str(tmp_path / "state"),
        "EVERSTEP_CHECKS__WITHIN_S": "30",
    }


@pytest.mark.parametrize(
    ("script", "code", "state"), [("exit 0", 0, "ok"), ("echo hot; exit 1", 1, "warning"),
                                 ("echo bad; exit 2", 2, "failed"), ("exit 9", 3, "unknown")]
)  # fmt: skip
def test_the_exit_code_is_that_of_nagios(
    prolog: dict[str, str], tmp_path: Path, script: str, code: int, state: str
) -> None:
    (tmp_path / "site").mkdir()
    program = tmp_path / "site" / "raid"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    prolog["EVERSTEP_CHECKS__SITE_DIR"] = str(program.parent)
    done = check(prolog, "recorder", "site:raid", "-o", "json")
    assert (done.returncode, done.stderr) == (code, "")
    document = json.loads(done.stdout)
    assert (document["node"], document["state"], document["code"]) == ("n7", state, code)
    assert document["checks"] == ["recorder", "site:raid"]


def test_in_a_prolog_everything_can_be_examined(prolog: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("raise SystemExit('a module of the directory was imported')")
    done = check(prolog, cwd=tmp_path)
    assert done.stderr == ""
    assert done.returncode in {0, 1, 2}
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("n7: ")
    assert {"gpu", "host", "kernel", "nic", "nvlink", "ptrace", "recorder", "storage"} == {
        line.split()[1] for line in lines[:-1]
    }
    assert f"{tmp_path}/state" in done.stdout
    assert (tmp_path / "state" / "checks" / "n7.json").is_file()


def test_quiet_says_nothing_when_nothing_is_amiss(prolog: dict[str, str]) -> None:
    done = check(prolog, "recorder", "--quiet")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_user_whom_no_password_file_knows_may_check(prolog: dict[str, str]) -> None:
    code = (
        "import pwd, sys\n"
        "def getpwuid(uid):\n"
        "    raise KeyError(uid)\n"
        "pwd.getpwuid = getpwuid\n"
        "from everstep_services.cli.__main__ import main\n"
        "sys.exit(main(['check', 'recorder', '--quiet']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code],
        env=prolog,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_it_needs_neither_a_bus_nor_services_nor_torch(prolog: dict[str, str]) -> None:
    code = (
        "import sys\n"
        "from everstep_services.cli.__main__ import main\n"
        "heavy = {'nats', 'torch', 'fastapi', 'sqlalchemy', 'rich', 'httpx2', 'pynvml'}\n"
        "print(main(['check', '--quiet', 'recorder']), heavy.intersection(sys.modules))\n"
    )
    said = subprocess.check_output(
        [sys.executable, "-P", "-c", code], env=prolog, text=True, timeout=50
    )
    assert said == "0 set()\n"


def test_forms_for_monitoring_can_be_read_back(prolog: dict[str, str]) -> None:
    done = check(prolog, "recorder", "-o", "prometheus")
    families = {one.name: one for one in text_string_to_metric_families(done.stdout)}
    (sample,) = families["everstep_check_code"].samples
    assert sample.labels == {"node": "n7", "check": "recorder", "subject": "", "state": "ok"}
    done = check(prolog, "recorder", "-o", "nagios")
    assert done.stdout.startswith("EVERSTEP OK - n7: 1 ok | failed=0 ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["hots"], "'hots' is not a check; did you mean host?"),
        (["--all", "host"], "--all runs every check: leave out host"),
        (["--zzz"], "No such option"),
        (["-o", "xml"], "'xml' is not one of 'human', 'json', 'nagios', 'prometheus'"),
        (["--within", "0"], "0"),
        (["network"], "--listen HOST:PORT on one, --peer HOST:PORT on the other"),
        (["host", "--peer", "a:1"], "the network is measured between two nodes"),
        (["network", "--peer", "a:1"], "no token: give both ends the same --secret-file"),
        (["network", "--peer", "nowhere"], "'nowhere' is not an address"),
        (["network", "--peer", "a:1", "--secret-file", "/nonexistent"], "cannot be read"),
    ],
)
def test_wrong_usage_is_unknown_and_never_a_failed_node(
    prolog: dict[str, str], arguments: list[str], said: str
) -> None:
    done = check(prolog, *arguments)
    assert (done.returncode, done.stdout) == (3, "")
    assert said in done.stderr


def test_wrong_settings_are_unknown(prolog: dict[str, str]) -> None:
    prolog["EVERSTEP_CHECKS__WITHIN"] = "3"
    done = check(prolog, "host")
    assert done.returncode == 3
    assert "did you mean EVERSTEP_CHECKS__WITHIN_S" in done.stderr


def test_the_list_says_what_takes_from_ranks(prolog: dict[str, str]) -> None:
    done = check(prolog, "--list")
    assert done.returncode == 0, done.stderr
    of = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert of["gpu-selftest"].endswith("(not during a training)")
    assert "training" not in of["host"]
    items = json.loads(check(prolog, "--list", "-o", "json").stdout)["items"]
    assert [one["name"] for one in items] == list(of)


def test_two_nodes_measure_the_way_between_them(prolog: dict[str, str], tmp_path: Path) -> None:
    secret = tmp_path / "token"
    secret.write_text(TOKEN)
    listener = Process(
        [*EVERSTEP, "check", "network", "--listen", "--secret-file", str(secret)],
        environment(tmp_path, "network"),
        tmp_path / "listener.log",
    )
    try:
        said = until(lambda: listener.said, "it listens", holds=lambda text: "\n" in text)
        where = said.split()[-1]
        prolog["EVERSTEP_CHECK_TOKEN"] = TOKEN
        prolog["EVERSTEP_CHECKS__NETWORK_LEAST_MIB_S"] = "1e9"
        done = check(prolog, "network", "--peer", where, "-o", "json")
        assert done.returncode == 2, done.stderr
        (item,) = json.loads(done.stdout)["items"]
        assert (item["check"], item["subject"], item["state"]) == ("network", where, "failed")
        assert "(least 1e+09 MiB/s)" in item["reason"]
        assert listener.wait() == 0
        assert "ok  network  127.0.0.1  it has measured the way here" in listener.said
        assert TOKEN not in listener.said
    finally:
        listener.kill()
    done = check(prolog, "network", "--peer", where)
    assert done.returncode == 3
    assert "unknown" in done.stdout


# -- the programs for Slurm's prolog and epilog --------------------------------------------------


def node_program(environ: Mapping[str, str], *words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [*EVERSTEP, "slurm", *words],
        env=dict(environ), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip


def site_check(environ: dict[str, str], folder: Path, script: str) -> dict[str, str]:
    (folder / "site").mkdir()
    program = folder / "site" / "raid"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return {**environ, "EVERSTEP_CHECKS__SITE_DIR": str(program.parent)}


@pytest.mark.parametrize("name", ["prolog", "epilog"])
def test_a_prolog_fails_only_for_a_failed_check(
    prolog: dict[str, str], tmp_path: Path, name: str
) -> None:
    """Slurm drains the node of a prolog or epilog that fails (A12.3)."""
    environ = site_check(prolog, tmp_path, "echo disk 3 is missing; exit 2")
    done = node_program(environ, name, "site:raid")
    assert done.returncode == 1
    assert f"everstep {name}: " in done.stderr
    assert "disk 3 is missing" in done.stderr


@pytest.mark.parametrize("script", ["exit 0", "echo hot; exit 1", "exit 9", "sleep 1000"])
def test_a_prolog_drains_no_node_for_a_warning_or_a_check_that_hangs(
    prolog: dict[str, str], tmp_path: Path, script: str
) -> None:
    done = node_program(
        site_check(prolog, tmp_path, script), "prolog", "site:raid", "--within", "5"
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("name", "setting"), [("site:missing", ""), ("recorder", "EVERSTEP_CHECKS__EVERY_S")]
)
def test_a_typing_error_drains_no_node(prolog: dict[str, str], name: str, setting: str) -> None:
    done = node_program({**prolog, **({setting: "soon"} if setting else {})}, "prolog", name)
    assert done.returncode == 0, done.stderr
    wrong = "this node was not checked: " if setting else "'site:missing' is not a check"
    assert wrong in done.stderr
