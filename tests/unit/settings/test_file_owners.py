"""Settings name programs: a file that a stranger may have written is not read by itself."""

import os
from pathlib import Path

import pytest

from everstep.settings import SettingsError, config_files


@pytest.mark.parametrize("by", ["file", "folder", "link", "mode of file", "mode of folder"])
def test_a_strangers_file_is_refused(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its checks would run as whoever calls `everstep` in that folder, root too."""
    uid, stranger = os.geteuid(), 54321
    here, file = tmp_path / "here", tmp_path / "here" / "everstep.toml"
    here.mkdir()
    file.write_text('[checks.site]\nmine = "id"\n')
    if by == "link":
        file.rename(tmp_path / "real.toml")
        file.symlink_to(tmp_path / "real.toml")
    monkeypatch.chdir(here)
    environ = {"HOME": str(tmp_path)}
    assert config_files(environ, root=tmp_path) == (Path("everstep.toml"),)
    if by.startswith("mode"):
        (file if by.endswith("file") else here).chmod(0o777)
        why = "every user may write"
    elif uid == 0:
        os.chown(here if by == "folder" else file, stranger, -1, follow_symlinks=False)
        why = f"belongs to user {stranger}"
    else:
        monkeypatch.setattr(os, "geteuid", lambda: stranger)
        why = f"belongs to user {uid}"
    with pytest.raises(SettingsError, match=rf"everstep.toml is not read: .*{why}.*--config"):
        config_files(environ, root=tmp_path)
    assert config_files(environ, file, root=tmp_path) == (file,)


def test_behind_sudo_the_files_of_the_caller_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = os.geteuid() or 54321
    (tmp_path / "everstep.toml").write_text("")
    if os.geteuid() == 0:
        os.chown(tmp_path / "everstep.toml", owner, -1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    environ = {"HOME": str(tmp_path / "home")}
    monkeypatch.setenv("SUDO_UID", str(owner))
    assert config_files(environ, root=tmp_path) == (Path("everstep.toml"),)
    monkeypatch.setenv("SUDO_UID", str(owner + 1))
    with pytest.raises(SettingsError, match="belongs to"):
        config_files(environ, root=tmp_path)
