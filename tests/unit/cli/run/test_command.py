"""`everstep run --check`, its help, and the pages that show it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from everstep_services.cli.__main__ import ft_launcher, main
from everstep_services.cli.run.arguments import scan
from tests.unit.agent.run_plans import plan


@pytest.fixture
def alone(home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in list(os.environ):
        if name.startswith(("EVERSTEP_", "XDG_", "PET_", "SLURM")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(home))
    return home


def test_check_prints_the_plan_and_starts_nothing(
    alone: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--check", "--nproc-per-node", "2", "train.py", "--lr", "3"]) == 0
    out, err = capsys.readouterr()
    assert "ranks_per_node\t2\n" in out
    assert "train.py --lr 3\n" in out
    assert err.startswith("note: OMP_NUM_THREADS is 1")
    assert list(alone.iterdir()) == [alone / "train.py"]


def test_the_launcher_of_nvrx_is_run_as_nvrx(
    alone: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [
        "--job=j",
        "--allocation=a",
        "--ft-rank_section_timeouts",
        "step:60",
        "--check",
        "train.py",
    ]
    monkeypatch.setattr("sys.argv", ["ft_launcher", *words])
    assert ft_launcher() == 0
    launched = capsys.readouterr()
    assert main(["run", "--as-nvrx", *words]) == 0
    assert capsys.readouterr() == launched
    assert "--ft-rank-section-timeouts is taken as --limit step=60" in launched.err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["missing.py"], "there is no script missing.py in "),
        (["missing"], "a module needs -m, another program --no-python"),
        (["-m", "no.such"], "there is no module no.such"),
        (["--no-python", "no-such"], "there is no program no-such"),
        (["--log-dir", "train.py/x", "train.py"], "nothing can be written to "),
        (["--log-dir", "/proc/logs", "train.py"], "nothing can be written to /proc: "),
        (["--state-dir", "/proc/state", "train.py"], "with --state-dir"),
        (["."], "is a folder without a __main__.py"),
        (["--preload", "no.such", "train.py"], "--preload no.such: there is no such module"),
    ],
)
def test_check_says_what_would_be_refused(
    alone: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["run", "--check", *words]) == 2
    checked = capsys.readouterr().err
    assert "refused: " in checked
    assert said in checked
    assert main(["run", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err
    assert err.count("\n") == 1


def test_what_is_preloaded_by_itself_is_no_module(alone: Path) -> None:
    assert main(["run", "--check", "--preload", "auto,json", "train.py"]) == 0


@pytest.mark.parametrize("check", [["--check"], []])
@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--bus-url", "http://a:4222", "[bus] url: http:// is not an address of a bus"),
        ("--bus-url", "", "--bus-url is empty: give it a value, or leave the option out"),
        ("--bus-credentials-file", "", "--bus-credentials-file is empty"),
    ],
)
def test_what_cannot_be_a_bus_is_refused_at_once(
    alone: Path,
    capsys: pytest.CaptureFixture[str],
    check: list[str],
    option: str,
    value: str,
    said: str,
) -> None:
    assert main(["run", *check, option, value, "train.py"]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("nats://127.0.0.1:1", "refused: nothing listens at nats://127.0.0.1:1: start a server"),
        (
            "nats://no-such.invalid:4222",
            "refused: the host in nats://no-such.invalid:4222 is unknown",
        ),
    ],
)
def test_check_connects_to_the_bus_as_an_agent_would(
    alone: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    url: str,
    said: str,
) -> None:
    monkeypatch.setenv("EVERSTEP_BUS__CONNECT_WITHIN_S", "3")
    assert main(["run", "--check", "--job", "j", "--bus-url", url, "train.py"]) == 94
    assert said in capsys.readouterr().err


def test_the_page_is_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--nnodes", "2", "--help"]) == 0
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 100
    headings = ["Examples:", "What to run:", "On which nodes:", "Restarts:", "Logs:", "Exit codes:"]
    assert sorted(headings, key=said.index) == headings
    assert "--ft-segment" not in said


def test_the_plan_is_made_without_torch(alone: Path) -> None:
    code = (
        "import sys\n"
        "from everstep_services.cli.__main__ import main\n"
        "code = main(['run', '--check', '--nproc-per-node', 'auto', 'train.py'])\n"
        "assert code == 0 and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=50)


def test_an_agent_on_a_bus_needs_nothing_that_only_services_need() -> None:
    code = (
        "import sys\n"
        "sys.modules |= dict.fromkeys(['uvicorn', 'fastapi', 'sqlalchemy', 'alembic', 'torch'])\n"
        "import everstep_services.cli.run.start, everstep_services.cli.run.launch\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50)


# -- the pages -----------------------------------------------------------------------------

DOCS = Path(__file__).parents[4] / "docs"


def test_command_lines_in_the_pages_are_understood() -> None:
    found = 0
    for page in [*DOCS.rglob("*.md"), DOCS.parent / "README.md"]:
        for line in page.read_text().splitlines():
            _, begin, words = line.partition("everstep run ")
            if begin and line.startswith(("$ everstep run ", "srun everstep run ")):
                assert scan(words.split(), {}).script, line
                found += 1
    assert found >= 5


def test_examples_of_the_help_page_are_understood(home: Path) -> None:
    from everstep_services.cli.run.help_page import EXAMPLES

    for command, _ in EXAMPLES:
        words = command.partition("everstep run ")[2].split()
        made = plan(home, *words, SLURM_JOB_ID="7", EVERSTEP_BUS__URL="nats://127.0.0.1:4222")
        assert made.command.target
