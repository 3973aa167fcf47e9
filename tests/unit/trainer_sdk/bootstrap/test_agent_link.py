"""The parts of the bootstrap that need no agent, and the messages of a link."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.trainer_sdk.script_ranks import script_rank
from trainer_sdk import bootstrap, layout
from trainer_sdk.bootstrap.agent_link import AgentLink
from trainer_sdk.page import make_page
from trainer_sdk.page_content import RankPhase
from trainer_sdk.wire import ScriptFinished, Stepped, Up, encode, pack, unpack

MAIN = Path(bootstrap.__file__).with_name("__main__.py")


def test_a_rank_imports_few_modules_before_its_script(tmp_path: Path) -> None:
    (tmp_path / "count.py").write_text("import sys; print(*sys.modules)\n")
    ours = loaded(MAIN, "rank", "script", "count.py", cwd=tmp_path)
    more = ours - loaded(tmp_path / "count.py", cwd=tmp_path)
    assert not more & {"typing", "dataclasses", "json", "msgspec", "socket", "traceback", "enum"}
    # A count, not a time: the same on every machine.
    assert len(more) < 20, sorted(more)


def loaded(*arguments: str | Path, cwd: Path) -> set[str]:
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def test_a_page_shows_what_its_rank_wrote(tmp_path: Path) -> None:
    view = make_page(str(tmp_path / "page"))
    assert view.read() is None
    environ = {"RANK": "3", layout.ROUND_VARIABLE: "7"}
    assert not AgentLink(environ | {layout.PAGE_VARIABLE: str(tmp_path / "page")}).attached
    assert os.stat(tmp_path / "page").st_mode & 0o777 == 0o600
    assert view.read() is None, "without a socket to its agent it is not a rank of it"
    view.close()


@pytest.mark.parametrize(
    ("script", "code"), [("", 0), ("raise SystemExit(0)", 0), ("exit(3)", 3), ("1 / 0", 1)]
)
def test_a_page_has_the_exit_code_of_its_script(tmp_path: Path, script: str, code: int) -> None:
    """Also while its process has not exited yet: nobody needs to guess it."""
    (tmp_path / "train.py").write_text(script)
    with script_rank(tmp_path) as rank:
        with rank.start(str(MAIN), "rank", "script", str(tmp_path / "train.py")) as process:
            process.communicate(timeout=50)
        assert process.returncode == code
        assert (rank.reading.phase, rank.reading.exit_code) == (RankPhase.ENDED, code)


def test_a_link_without_an_agent_accepts_all_calls_and_sends_nothing() -> None:
    link = AgentLink({})
    link.up()
    link.first_step()
    link.ended(3)
    assert not link.attached
    assert link.words[layout.PHASE] == layout.PHASE_ENDED


def test_an_environment_of_any_bytes_survives_the_wire() -> None:
    environ = {"PLAIN": "a", "ODD": os.fsdecode(bytes(range(1, 256))), "WIDE": "日本"}
    assert unpack(pack(environ)) == environ


def test_lines_name_their_kind() -> None:
    assert encode(Up(round=1, rank=2, pid=3)) == b'{"type":"up","round":1,"rank":2,"pid":3}\n'
    assert b'"stepped"' in encode(Stepped(round=1, rank=0, step=1))
    assert b'"ended"' in encode(ScriptFinished(round=1, rank=0, code=0))


def test_phases_have_the_names_that_people_read() -> None:
    assert list(RankPhase) == ["starting", "script", "ended"]
