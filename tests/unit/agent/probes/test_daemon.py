"""The check `daemon`, against a real gRPC server on a unix socket."""

import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.messages import CheckResult
from everstep_services.agent.probes.base import Look
from everstep_services.agent.probes.daemon import DaemonProbe
from everstep_services.agent.probes.settings import ChecksSettings
from tests.fakes.health_daemon import HealthDaemon, grpc, response


class Daemon(HealthDaemon):
    """A daemon that the check asks."""

    def examine(self, within_s: float = 60.0, **settings: Any) -> CheckResult:
        chosen = ChecksSettings(**{"daemon": self.socket} | settings)
        (result,) = DaemonProbe().examine(Look(chosen, within_s=within_s))
        return result


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    # A path of a unix socket has at most 107 bytes.
    folder = Path(f"/tmp/e-{abs(hash(tmp_path)) % 10**9}")
    folder.mkdir(mode=0o700)
    made = Daemon(folder / "nvhcd.sock")
    yield made
    made.server.stop(None).wait()
    made.socket.unlink(missing_ok=True)
    folder.rmdir()


def test_a_daemon_without_failures_is_ok_and_gets_nvrxs_arguments(daemon: Daemon) -> None:
    assert daemon.examine().state == "ok"
    assert daemon.requests == [["--no-slurm", "--group", "prolog", "epilog", "logs", "gpu"]]
    daemon.examine(daemon_arguments=("--all",))
    assert daemon.requests[1] == ["--all"]


def test_counted_failures_fail_the_node(daemon: Daemon) -> None:
    daemon.answer = lambda _, __: response(success=True, output='{"fail_count": 2, "x": "gpu 3"}')
    result = daemon.examine()
    assert (result.state, result.failure_class) == ("failed", "drain")
    assert result.reason.startswith("2 of its checks fail: ")
    assert "gpu 3" in result.reason


def test_a_run_without_success_fails_the_node(daemon: Daemon) -> None:
    daemon.answer = lambda _, __: response(success=False, code=3, error="disk\nis full")
    result = daemon.examine()
    assert (result.state, result.reason) == ("failed", "disk is full")


@pytest.mark.parametrize(
    "output", ["", "not json", "[]", "{}", '{"fail_count": "many"}', '{"fail_count": -1}',
               '{"fail_count": true}', "[" * 100_000],
)  # fmt: skip
@pytest.mark.parametrize("silent", ["unknown", "ok", "failed"])
def test_an_answer_without_a_count_means_what_the_settings_say(
    daemon: Daemon, output: str, silent: str
) -> None:
    daemon.answer = lambda _, __: response(success=True, output=output)
    result = daemon.examine(daemon_silent=silent)
    assert result.state == silent
    assert "fail_count" in result.reason
    assert "\n" not in result.reason
    assert len(result.reason) < 500


def test_bytes_that_are_not_a_message_have_no_result(daemon: Daemon) -> None:
    daemon.answer = lambda _, __: b"\xff\xff\xff"
    assert daemon.examine().state == "unknown"


def test_an_answer_of_many_megabytes_has_no_result(daemon: Daemon) -> None:
    daemon.answer = lambda _, __: response(success=True, output="x" * (8 << 20))
    result = daemon.examine()
    assert (result.state, "RESOURCE_EXHAUSTED" in result.reason) == ("unknown", True)


def test_a_slow_daemon_has_no_result(daemon: Daemon) -> None:
    over = threading.Event()

    def slowly(_: list[str], __: Any) -> bytes:
        over.wait(60)
        return response(success=True)

    daemon.answer = slowly
    result = daemon.examine(within_s=0.8)
    over.set()
    assert (result.state, "DEADLINE_EXCEEDED" in result.reason) == ("unknown", True)


def test_a_daemon_that_refuses_has_no_result(daemon: Daemon) -> None:
    def refuse(_: list[str], context: Any) -> bytes:
        context.abort(grpc.StatusCode.PERMISSION_DENIED, "root only")
        return b""

    daemon.answer = refuse
    assert "PERMISSION_DENIED: root only" in daemon.examine().reason


def test_without_a_daemon_or_its_socket(tmp_path: Path) -> None:
    (none,) = DaemonProbe().examine(Look(ChecksSettings()))
    assert none.state == "unsupported"
    (absent,) = DaemonProbe().examine(Look(ChecksSettings(daemon=tmp_path / "no.sock")))
    assert (absent.state, "does not exist" in absent.reason) == ("unknown", True)
    stale = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(stale))
    (dead,) = DaemonProbe().examine(Look(ChecksSettings(daemon=stale), within_s=5))
    assert (dead.state, "\n" in dead.reason) == ("unknown", False)
