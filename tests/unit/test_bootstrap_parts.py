"""The bootstrap's parts that need no agent: imports that it finds, what it adds, its page."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainer_sdk import layout
from trainer_sdk.bootstrap import preload
from trainer_sdk.bootstrap.link import Link
from trainer_sdk.page import Phase, make_page
from trainer_sdk.wire import Command, Ended, Stepped, Up, encode, pack, unpack

MAIN = Path(preload.__file__).with_name("__main__.py")


def script(folder: Path, text: str) -> Command:
    (folder / "train.py").write_text(text)
    return Command(kind="script", target="train.py")


def test_only_installed_modules_of_the_top_level_are_preloaded(tmp_path: Path) -> None:
    (tmp_path / "hypothesis.py").write_text("")  # the user's own hides the installed one
    command = script(
        tmp_path,
        "import os, msgspec.json as j, hypothesis, nowhere\n"
        "try:\n    import numpy\nexcept ImportError:\n    pass\n"
        "from . import beside\n"
        "if __name__ == '__main__':\n    import torch\n"
        "def late():\n    import nats\n",
    )
    assert preload.imports_of_script(command, str(tmp_path)) == ("msgspec.json", "numpy")


@pytest.mark.parametrize("text", ["x = (", "\0"])
def test_a_script_that_cannot_be_read_preloads_nothing(tmp_path: Path, text: str) -> None:
    assert preload.imports_of_script(script(tmp_path, text), str(tmp_path)) == ()
    assert preload.imports_of_script(Command(kind="script", target="no.py"), str(tmp_path)) == ()


def test_the_imports_of_a_module_are_found_without_running_its_package(tmp_path: Path) -> None:
    package = tmp_path / "mine"
    package.mkdir()
    (package / "__init__.py").write_text("raise SystemExit\n")
    (package / "train.py").write_text("import msgspec\n")
    (package / "__main__.py").write_text("import numpy\n")
    for target, found in (("mine.train", ("msgspec",)), ("mine", ("numpy",))):
        command = Command(kind="module", target=target)
        assert preload.imports_of_script(command, str(tmp_path)) == found


def test_a_rank_imports_little_before_its_script(tmp_path: Path) -> None:
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


def test_a_page_says_what_its_rank_wrote(tmp_path: Path) -> None:
    view = make_page(str(tmp_path / "page"))
    assert view.read() is None
    environ = {"RANK": "3", layout.ROUND_VARIABLE: "7"}
    assert not Link(environ | {layout.PAGE_VARIABLE: str(tmp_path / "page")}).attached
    assert os.stat(tmp_path / "page").st_mode & 0o777 == 0o600
    assert view.read() is None, "without a socket to its agent it is no rank of it"
    view.close()


def test_a_link_without_an_agent_takes_everything_and_says_nothing() -> None:
    link = Link({})
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
    assert b'"ended"' in encode(Ended(round=1, rank=0, code=0))


def test_phases_have_the_names_that_people_read() -> None:
    assert list(Phase) == ["starting", "script", "ended"]
