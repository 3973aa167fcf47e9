"""Storage: which file systems are touched, what each outcome means, and a hang of one."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from everstep_services.agent.probes import program
from everstep_services.agent.probes.program import ProgramResult
from everstep_services.agent.probes.storage import probe
from everstep_services.agent.probes.storage.mounts import Mount, network_mounts
from everstep_services.agent.probes.storage.probe import StorageProbe, judge
from tests.unit.agent.probes.looks import look_at, states

TABLE = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
23 27 0:22 / /home rw,relatime shared:7 master:2 - nfs4 server:/home rw,vers=4.2
24 27 0:23 / /my\040data rw - lustre 10.0.0.1@tcp:/data ro,flock
25 27 0:24 / /models ro - fuse.glusterfs models ro
26 27 0:25 / /tmp rw - tmpfs tmpfs rw
27 27 0:26 / /hidden rw - nfs server:/x rw
28 27 0:26 / /hidden rw - ext4 /dev/vda rw
garbage
"""


def test_network_mounts_are_found_without_touching_them(tmp_path: Path) -> None:
    found = network_mounts(look_at(tmp_path, {"proc/self/mountinfo": TABLE}))
    assert found == (
        Mount(Path("/home"), "nfs4", has_become_read_only=False),
        Mount(Path("/my data"), "lustre", has_become_read_only=True),
        Mount(Path("/models"), "fuse.glusterfs", has_become_read_only=False),
    )


def table(*paths: Path) -> dict[str, str]:
    lines = [f"{n} 1 0:{n} / {path} rw - nfs s:/x rw\n" for n, path in enumerate(paths)]
    return {"proc/self/mountinfo": "".join(lines)}


def test_without_network_storage_it_is_unsupported(tmp_path: Path) -> None:
    (one,) = StorageProbe().examine(look_at(tmp_path, table()))
    assert one.state == "unsupported"


def test_folders_are_written_to_only_when_they_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / "theirs").write_text("x")
    before = folder.stat().st_mtime_ns
    found = StorageProbe().examine(look_at(tmp_path, table(folder)))
    assert states(found) == {str(folder): "ok"}
    assert folder.stat().st_mtime_ns == before
    found = StorageProbe().examine(look_at(tmp_path, table(), storage_paths=(folder,)))
    assert states(found) == {str(folder): "ok"}
    assert folder.stat().st_mtime_ns > before
    assert os.listdir(folder) == ["theirs"]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("absent", "stat: No such file or directory; is it mounted?"),
        ("file", "list: Not a directory; name a folder"),
    ],
)
def test_a_folder_that_is_none_has_failed(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "file").write_text("x")
    look = look_at(tmp_path, table(), storage_paths=(tmp_path / name,))
    (one,) = StorageProbe().examine(look)
    assert (one.state, one.failure_class) == ("failed", "drain")
    assert one.reason.startswith(said)


TOUCH = """
echo stat
case $1 in
    */dead) echo fsync; echo > "$0/hangs"; read -r never < "$1";;  # nobody ever writes to it
    *) echo $$ > "$0/ended";;
esac
"""


def test_a_hang_fails_that_folder_alone_and_says_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def elapsed_s() -> float:
        """None of the limit, until one program hangs and the other one has ended."""
        try:
            ended = int((tmp_path / "ended").read_text())
            hangs = (tmp_path / "hangs").exists()
            has_ended = Path(f"/proc/{ended}/stat").read_text().split()[2] == "Z"
        except (FileNotFoundError, ValueError):
            return 0.0
        return 0.2 if hangs and has_ended else 0.0

    for module in (program, probe):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=elapsed_s))
    os.mkfifo(tmp_path / "dead")
    paths = (tmp_path / "dead", tmp_path / "alive")
    look = look_at(tmp_path, table(), storage_paths=paths, storage_within_s=0.2)
    dead, alive = StorageProbe(touch=("/bin/sh", "-c", TOUCH, str(tmp_path))).examine(look)
    assert (dead.state, alive.state) == ("failed", "ok")
    assert dead.reason == "fsync did not end within 0.2 s; is its server reachable?"


@pytest.mark.parametrize(
    ("ran", "state", "said"),
    [
        (ProgramResult(None, b""), "unknown", "did not start within 5 s"),
        (ProgramResult(None, b"stat\nlis"), "failed", "stat did not end within 5 s"),
        (ProgramResult(-9, b""), "unknown", "ended: -9"),
        (
            ProgramResult(1, b"write\nENOSPC No space left on device\n"),
            "failed",
            "write: No space left",
        ),
        (ProgramResult(1, b"write\nEDQUOT Disk quota exceeded\n"), "failed", "larger quota"),
        (ProgramResult(1, b"stat\nESTALE Stale file handle\n"), "failed", "mount it again"),
        (
            ProgramResult(1, b"make a file\nEROFS Read-only file system\n"),
            "failed",
            "it is read-only",
        ),
        (
            ProgramResult(1, b"make a file\nEACCES Permission denied\n"),
            "warning",
            "user who trains",
        ),
        (
            ProgramResult(1, b"read\nEIO what was read is not what was written\n"),
            "failed",
            "not what was",
        ),
        (ProgramResult(1, b"read\nEWHAT\n"), "failed", "read: "),
        (ProgramResult(1, b"\xff\n\xfe\n"), "failed", "kernel's log"),
        (ProgramResult(0, b"stat\n"), "ok", ""),
    ],
)
def test_what_an_outcome_means(ran: ProgramResult, state: str, said: str) -> None:
    one = judge("/data", ran, None, 5)
    assert one.state == state
    assert said in one.reason


def test_a_mount_that_the_kernel_made_read_only_has_failed() -> None:
    mount = Mount(Path("/data"), "lustre", has_become_read_only=True)
    assert judge("/data", ProgramResult(0, b"stat\n"), mount, 5).state == "failed"


@pytest.mark.parametrize(
    ("text", "state"),
    [("healthy\n", "ok"), ("NOT HEALTHY\n", "failed"), ("", "failed"), ("LBUG\n", "failed")],
)
def test_lustre_says_itself_how_it_is(tmp_path: Path, text: str, state: str) -> None:
    files = {"sys/fs/lustre/health_check": text, **table()}
    assert states(StorageProbe().examine(look_at(tmp_path, files))) == {"lustre": state}
