"""The checks of stacks, of the recorder and of the site, and the programs that they run."""

import time
from pathlib import Path

import pytest

from everstep_services.agent.probes.base import Look
from everstep_services.agent.probes.host.flight_recorder import RecorderProbe, judge
from everstep_services.agent.probes.host.ptrace import PtraceProbe, read_own_memory
from everstep_services.agent.probes.program import Program, ProgramResult
from everstep_services.agent.probes.registry import SiteProbe, site_commands
from everstep_services.agent.probes.settings import ChecksSettings
from tests.unit.agent.probes.looks import look_at
from tests.waiting import WITHIN_S, until

# -- ptrace ----------------------------------------------------------------------------------


def refused(path: Path) -> None:
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize(
    ("scope", "capabilities", "said"),
    [
        ("1\n", "0", "kernel.yama.ptrace_scope is 1: only parents"),
        ("2\n", "0", "sudo sysctl kernel.yama.ptrace_scope=0"),
        ("3\n", "1ff", "until the next boot; reboot"),
        ("0\n", "00000000a80425fb", "other users' processes"),
        ("0\n", "000001ffffffffff", "the kernel refuses it"),
        ("N/A", "N/A", "the kernel refuses it"),
    ],
)
def test_why_stacks_cannot_be_read_is_said_as_a_warning(
    tmp_path: Path, scope: str, capabilities: str, said: str
) -> None:
    files = {
        "proc/sys/kernel/yama/ptrace_scope": scope,
        "proc/self/status": f"Name:\tx\nCapEff:\t{capabilities}\n",
    }
    probe = PtraceProbe(open_memory=refused, read_own_memory=lambda: None)
    (one,) = probe.examine(look_at(tmp_path, files))
    assert one.state == "warning"
    assert said in one.reason


def test_a_containers_filter_is_told_apart(tmp_path: Path) -> None:
    def filtered() -> None:
        raise OSError(38, "Function not implemented")

    (one,) = PtraceProbe(read_own_memory=filtered).examine(look_at(tmp_path, {}))
    assert "--cap-add SYS_PTRACE" in one.reason


def test_each_rank_is_tried_and_those_that_have_ended_are_passed_over(tmp_path: Path) -> None:
    files = {"proc/7/mem": "", "proc/9/mem": ""}
    tried: list[str] = []

    def open_memory(path: Path) -> None:
        tried.append(path.parent.name)
        path.read_bytes()

    probe = PtraceProbe(open_memory=open_memory, read_own_memory=lambda: None)
    (one,) = probe.examine(look_at(tmp_path, files, own_pids=[7, 8, 9]))
    assert (one.state, sorted(tried)) == ("ok", ["7", "8", "9"])


def test_it_answers_on_this_host() -> None:
    read_own_memory()
    (one,) = PtraceProbe().examine(Look(settings=ChecksSettings()))
    assert one.state in {"ok", "warning"}


# -- recorder --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "is_ours", "state"),
    [
        ({}, True, "ok"),
        ({}, False, "warning"),
        ({"TORCH_FR_BUFFER_SIZE": "2000"}, False, "ok"),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "2000"}, False, "ok"),
        ({"TORCH_FR_BUFFER_SIZE": "0"}, True, "warning"),
        ({"TORCH_FR_BUFFER_SIZE": ""}, True, "warning"),
        ({"TORCH_FR_BUFFER_SIZE": "many" * 100}, True, "warning"),
    ],
)
def test_a_recorder_that_is_off_is_a_warning(
    environ: dict[str, str], is_ours: bool, state: str
) -> None:
    one = judge(environ, is_ours=is_ours)
    assert one.state == state
    assert len(one.reason) < 200


def test_ranks_of_a_foreign_launcher_have_to_set_it(tmp_path: Path) -> None:
    files = {
        "proc/7/environ": "EVERSTEP_AGENT=x\0A=b\0",
        "proc/8/environ": "A=b\0nonsense\0",
        "proc/9/environ": "A=c\0",
    }
    found = list(RecorderProbe().examine(look_at(tmp_path, files, own_pids=[7, 8, 9, 10])))
    assert sorted(one.state for one in found) == ["ok", "warning"]


def test_without_ranks_it_looks_at_whoever_asks(tmp_path: Path) -> None:
    """`everstep check` finds a flight recorder that is off, and names the remedy (A1.5)."""
    files = {"proc/self/environ": "TORCH_FR_BUFFER_SIZE=0\0"}
    (one,) = RecorderProbe().examine(look_at(tmp_path, files))
    assert one.state == "warning"
    assert "'0': nothing is recorded; export TORCH_FR_BUFFER_SIZE=2000" in one.reason


# -- site ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "state", "reason"),
    [
        ("echo fine; echo more; exit 0", "ok", "fine"),
        ("exit 0", "ok", ""),
        ("echo hot; exit 1", "warning", "hot"),
        ("echo 'broken | x=1'; exit 2", "failed", "broken | x=1"),
        ("exit 2", "failed", "/bin/sh ended with code 2."),
        ("exit 3", "unknown", "/bin/sh ended with code 3."),
        ("echo odd; exit 4", "unknown", "/bin/sh ended with code 4. odd"),
        ("kill -9 $$", "unknown", "/bin/sh ended with code -9."),
        ("printf 'lat\\351\\n'; exit 1", "warning", "lat�"),
        ("sleep 60 & echo left; exit 1", "warning", "left"),
    ],
)
def test_a_site_check_speaks_as_nagios(script: str, state: str, reason: str) -> None:
    look = Look(settings=ChecksSettings(within_s=WITHIN_S))
    (one,) = SiteProbe("site:x", ("/bin/sh", "-c", f"exec 2>&1\n{script}")).examine(look)
    assert (one.check, one.state, one.reason) == ("site:x", state, reason)


def test_a_site_check_that_does_not_end_says_nothing_of_the_node() -> None:
    look = Look(settings=ChecksSettings(within_s=0.1))
    (one,) = SiteProbe("site:x", ("/bin/sleep", "60")).examine(look)
    assert (one.state, one.reason) == ("unknown", "/bin/sleep did not end within 0.1 s")


def test_what_it_writes_is_bounded(tmp_path: Path) -> None:
    look = Look(settings=ChecksSettings())
    (one,) = SiteProbe("site:x", ("/bin/sh", "-c", "yes | head -c 9000000; exit 1")).examine(look)
    assert one.reason == "y"
    (one,) = SiteProbe("site:x", ("/usr/bin/env", "head", "-c5000", "/dev/zero")).examine(look)
    assert len(one.reason) == 1024


@pytest.mark.parametrize("is_there", [True, False])
def test_a_program_that_cannot_be_started_is_unknown(tmp_path: Path, is_there: bool) -> None:
    path = tmp_path / "check"
    if is_there:
        path.write_text("not executable")
    (one,) = SiteProbe("site:x", (str(path),)).examine(Look(settings=ChecksSettings()))
    assert one.state == "unknown"
    assert one.reason.startswith(f"{path} cannot be started: ")


def test_a_folder_brings_its_files_and_settings_win(tmp_path: Path) -> None:
    for name in ("disk.sh", ".hidden", "disk.sh~", "old name", "raid"):
        (tmp_path / name).write_text("")
    settings = ChecksSettings(site={"raid": "/bin/raid --all 'two words'"}, site_dir=tmp_path)
    assert site_commands(settings) == {
        "disk.sh": (str(tmp_path / "disk.sh"),),
        "raid": ("/bin/raid", "--all", "two words"),
    }


def test_a_program_is_killed_at_its_deadline_and_gone() -> None:
    program = Program.start(["/bin/sleep", "600"])
    assert program.wait(time.monotonic() + 0.1).code is None
    gone = Path(f"/proc/{program.pid}")
    until(lambda: not gone.exists(), "it has been killed and waited for")


def test_what_has_ended_before_anybody_looked_is_told_as_it_was() -> None:
    program = Program.start(["/bin/sh", "-c", "echo said; exit 7"])
    stat = Path(f"/proc/{program.pid}/stat")
    until(lambda: stat.read_text().split()[2] == "Z", "it has ended")
    assert program.wait(time.monotonic() - 1) == ProgramResult(7, b"said\n")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"site": {"a b": "/bin/true"}}, "'a b' is not a name"),
        ({"site": {"a": "/bin/true 'x"}}, "cannot be read: No closing quotation"),
        ({"site": {"a": "  "}}, "a has no command"),
        ({"within_s": 0}, "within_s must be above 0, got 0"),
        ({"room_failed_mib": 2000}, "got 2000 > 1024"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        ChecksSettings(**changes)  # type: ignore[arg-type]
