"""The first token: a file that others wait for, and that only its user may read."""

import asyncio
import os
import stat
from datetime import datetime
from pathlib import Path

import pytest

from everstep.store.database import Database
from everstep.store.tokens import Tokens
from everstep_services.history.commands import TokenFileError, make_first_token
from tests.fakes.clock import FakeClock


class Onlooker(FakeClock):
    """Looks for a file whenever it is asked for the time, as when the token is made."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self._path = path
        self.has_seen: list[bool] = []

    def wall(self) -> datetime:
        self.has_seen.append(self._path.exists())
        return super().wall()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "tokens"
    folder.mkdir()
    return folder


async def test_its_file_has_the_token_as_soon_as_it_is_there(
    database: Database, folder: Path
) -> None:
    path = folder / "token"
    clock = Onlooker(path)
    assert await make_first_token(database, path, clock)
    assert clock.has_seen == [False]
    text = await asyncio.to_thread(path.read_text)
    assert await Tokens(database).find(text.strip()) is not None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert await asyncio.to_thread(os.listdir, folder) == ["token"]
    assert not await make_first_token(database, folder / "another", clock)


@pytest.mark.parametrize("name", ["is-a-folder", "missing/token"])
async def test_where_its_file_cannot_be_there_is_no_token_either(
    database: Database, folder: Path, name: str
) -> None:
    (folder / "is-a-folder").mkdir()
    with pytest.raises(TokenFileError, match="set api.first_token_file to a new file"):
        await make_first_token(database, folder / name, FakeClock())
    assert not await Tokens(database).any()
