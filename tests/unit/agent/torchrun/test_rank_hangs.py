"""The folder in which torchrun's agent and ranks meet has a name that anybody can guess."""

from pathlib import Path

import pytest

from everstep_services.agent.torchrun import rank_hangs


@pytest.mark.parametrize("planted", ["parent", "folder"])
def test_a_folder_that_somebody_else_has_planted_is_not_used(tmp_path: Path, planted: str) -> None:
    folder, others = tmp_path / "everstep-1" / "attached-job", tmp_path / "others"
    others.mkdir()
    if planted == "folder":
        folder.parent.mkdir()
    (folder.parent if planted == "parent" else folder).symlink_to(others)
    with (
        pytest.raises(PermissionError, match="is not a folder of this user: remove it"),
        rank_hangs._door(folder),
    ):
        pass
    assert list(others.iterdir()) == []
