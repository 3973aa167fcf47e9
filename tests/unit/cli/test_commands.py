"""The command line: fast help, exit codes that scripts rely on, data on stdout only."""

import ast
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import pytest

from everstep import __version__
from everstep.errors import EverstepError
from everstep_services.cli.__main__ import main
from everstep_services.cli.cells import cell
from everstep_services.cli.errors import CliError, Exit, exit_code
from everstep_services.cli.group import GROUPS, command_files, everstep, summary
from everstep_services.cli.invocation import NAME, Invocation
from everstep_services.cli.output import print_record, print_records

NAMES = list(command_files())
HEAVY = ("fastapi", "sqlalchemy", "nats", "pydantic", "uvicorn", "rich", "httpx2", "asyncio")


def imported_by(arguments: Sequence[str]) -> set[str]:
    """The top-level modules that a run of the program has imported at its end."""
    code = (
        "import sys\n"
        "from everstep_services.cli.__main__ import main\n"
        f"code = main({list(arguments)!r})\n"
        "print('|', code, *{name.partition('.')[0] for name in sys.modules})\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=True
    )
    _, _, last = done.stdout.rpartition("|")
    code_said, *modules = last.split()
    assert code_said == "0", done.stderr
    return set(modules)


@pytest.mark.parametrize(
    "arguments", [["--help"], ["version"], ["completion", "zsh"], ["up", "--help"]], ids=" ".join
)
def test_help_and_version_import_nothing_heavy(arguments: list[str]) -> None:
    assert not imported_by(arguments) & set(HEAVY)


def test_help_imports_no_command() -> None:
    code = (
        "import sys\n"
        "from everstep_services.cli.__main__ import main\n"
        "main(['--help'])\n"
        "assert not [m for m in sys.modules if m.startswith('everstep_services.cli.commands.')]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=50, capture_output=True)


def test_help_lists_each_file_with_the_first_line_of_its_docstring(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["--help"]) == 0
    assert sorted(itertools.chain(*GROUPS.values())) == NAMES
    said = " ".join(capsys.readouterr().out.split())
    for name in NAMES:
        docstring = ast.get_docstring(ast.parse(command_files()[name].read_text()))
        assert docstring is not None
        first = docstring.splitlines()[0]
        assert first.endswith(".")
        assert summary(name) == first.rstrip(".")
        assert f"{name} {' '.join(first.rstrip('.').split())}" in said


@pytest.mark.parametrize("name", NAMES)
def test_each_command_has_help_and_the_common_options(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name, "--help"]) == 0
    said = capsys.readouterr().out
    command = everstep.get_command(click.Context(everstep), name)
    assert command is not None
    leaves = command.commands if isinstance(command, click.Group) else {name: command}
    assert f"Usage: everstep {name}" in said
    for leaf in leaves.values():
        assert leaf.help
        options = {option for parameter in leaf.params for option in parameter.opts}
        assert {"--output", "--config", "--no-color", "--state-dir"} <= options


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["versio9"], "no command 'versio9'; did you mean version?"),
        (["zzzz"], "no command 'zzzz'; see everstep --help"),
        (["version", "--zzz"], "No such option '--zzz'; see everstep version --help"),
        (["version", "-o", "xml"], "Invalid value for '-o'"),
        (["completion"], "Missing argument"),
        (["bus", "revoke"], "Missing argument 'JOB': everstep jobs lists jobs; see everstep bus"),
        (["ckpt", "pin", "llama"], "Missing argument 'STEP': everstep ckpt ls lists steps; see"),
        (["ckpt", "pin"], "Missing argument 'WHERE': a job, as everstep jobs lists them, or a fol"),
    ],
)
def test_wrong_usage_is_2_and_one_line_on_stderr(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == Exit.USAGE
    out, err = capsys.readouterr()
    assert err.startswith(f"everstep: {said}")
    assert len(err.splitlines()) == 1
    assert out == ""


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--version"], ["version"]):
        assert main(arguments) == 0
        assert capsys.readouterr().out == f"everstep {__version__}\n"
    for arguments in (["-o", "json", "version"], ["version", "-o", "json"]):
        assert main(arguments) == 0
        record = json.loads(capsys.readouterr().out)
        assert record["schema"] == "everstep.version/v1"
        assert record["version"] == __version__
    assert main(["version", "-o", "name"]) == 0
    assert capsys.readouterr().out == f"{__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    out, err = capsys.readouterr()
    assert f"_EVERSTEP_COMPLETE={shell}_complete" in out
    assert err == ""


def test_the_shell_completes_commands_without_importing_them() -> None:
    environ = {
        **os.environ,
        "_EVERSTEP_COMPLETE": "bash_complete",
        "COMP_WORDS": "everstep ver",
        "COMP_CWORD": "1",
    }
    code = (
        "import sys\n"
        "from everstep_services.cli.__main__ import main\n"
        "try:\n"
        "    main([])\n"
        "finally:\n"
        "    loaded = [m for m in sys.modules if m.startswith('everstep_services.cli.commands.')]\n"
        "    sys.stderr.write(repr(loaded))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environ,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.stdout.split() == ["plain,version"]
    assert done.stderr == "[]"


def test_exit_codes_are_an_api() -> None:
    assert {code.name: code.value for code in Exit} == {
        "OK": 0,
        "ERROR": 1,
        "USAGE": 2,
        "NOT_FOUND": 3,
        "UNREACHABLE": 4,
        "TIMED_OUT": 5,
        "FORBIDDEN": 6,
    }
    assert exit_code(CliError("x", Exit.NOT_FOUND)) == 3
    assert exit_code(EverstepError("x")) == 2


def test_errors_of_the_bus_have_codes() -> None:
    from everstep.bus import errors

    assert exit_code(errors.BusUnreachableError("x")) == Exit.UNREACHABLE
    assert exit_code(errors.BusTimeoutError("x")) == Exit.UNREACHABLE
    assert exit_code(errors.CredentialsExpiredError("x")) == Exit.FORBIDDEN
    assert exit_code(errors.NoStreamError("FACTS")) == Exit.NOT_FOUND
    assert exit_code(errors.NoLeaderError("FACTS")) == Exit.UNREACHABLE


@pytest.mark.parametrize("command", ["jobs", "why", "job", "ranks", "incident"])
def test_before_the_first_job_each_says_how_to_start_one(
    command: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("EVERSTEP_STATE_DIR", str(tmp_path / "state"))
    code = main([command])
    out, err = capsys.readouterr()
    assert (code, out) == (Exit.OK if command == "jobs" else Exit.UNREACHABLE, "")
    assert "no job has run on" in err
    assert "everstep run --nproc-per-node 4 train.py" in err


def test_a_closed_pipe_ends_it_quietly() -> None:
    done = subprocess.run(
        f"{sys.executable} -m everstep_services.cli --help | true",
        shell=True,
        check=True,
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stderr) == (0, "")


# -- output --------------------------------------------------------------------------------

RECORDS = [
    {"job": "llama", "step": 3, "is_ok": True, "note": None},
    {"job": "a\x1b[31m\tb\n", "step": 4, "is_ok": False, "note": ["x", "y"]},
]
COLUMNS = ["job", "step", "is_ok", "note"]


def printed(capsys: pytest.CaptureFixture[str], output: str | None) -> str:
    print_records(Invocation(output=output), "job", RECORDS, COLUMNS)
    return capsys.readouterr().out


def test_a_pipe_gets_tab_separated_lines(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, None) == "llama\t3\tyes\t\na\\u001b[31m b \t4\tno\tx, y\n"


def test_json_keeps_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert json.loads(printed(capsys, "json")) == {"schema": "everstep.job/v1", "items": RECORDS}
    assert [json.loads(line) for line in printed(capsys, "jsonl").splitlines()] == RECORDS


def test_names_are_the_first_column(capsys: pytest.CaptureFixture[str]) -> None:
    assert printed(capsys, "name") == "llama\na\\u001b[31m b \n"


def test_a_table_has_headings_and_obeys_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    heading, first, *_ = printed(capsys, "table").splitlines()
    assert heading.split() == ["JOB", "STEP", "IS", "OK", "NOTE"]
    assert first.split() == ["llama", "3", "yes"]
    assert "\x1b" not in printed(capsys, "table")


def test_one_record(capsys: pytest.CaptureFixture[str]) -> None:
    for output, expected in {
        None: "job\tllama\nstep\t3\n",
        "name": "llama\n",
        "jsonl": '{"job":"llama","step":3}\n',
    }.items():
        print_record(Invocation(output=output), "job", {"job": "llama", "step": 3}, name="job")
        assert capsys.readouterr().out == expected


def test_a_cell_is_one_line() -> None:
    assert [cell(value) for value in (None, True, {"a": 1}, "a\x00\x9bb", 1.5)] == [
        "",
        "yes",
        '{"a":1}',
        "a\\u0000\\u009bb",
        "1.5",
    ]


# -- config --------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home of the test's own; the current folder is elsewhere, and empty."""
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for name in list(os.environ):
        if name.startswith(("EVERSTEP_", "XDG_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_config_show_says_where_each_value_came_from(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = home / "my.toml"
    file.write_text('[bus]\nurl = "nats://u:hunter22@h:4222"\n')
    monkeypatch.setenv("EVERSTEP_LOG__LEVEL", "debug")
    assert main(["config", "show", "--config", str(file), "-o", "json"]) == 0
    items = {item["key"]: item for item in json.loads(capsys.readouterr().out)["items"]}
    assert items["bus.url"]["origin"] == f"file {file}"
    assert items["bus.url"]["value"] == "nats://***@h:4222"
    assert items["log.level"]["origin"] == "environment EVERSTEP_LOG__LEVEL"
    assert items["log.format"] == {
        "key": "log.format",
        "value": "auto",
        "origin": "default",
        "help": "`json` has one object a line; "
        "`auto` is `console` on a terminal and `json` elsewhere.",
    }
    assert main(["config", "show", "log"]) == 0
    assert {line.split(".")[0] for line in capsys.readouterr().out.splitlines()} == {"log"}


def test_every_setting_has_help(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "-o", "json"]) == 0
    out, err = capsys.readouterr()
    items = json.loads(out)["items"]
    assert [item["key"] for item in items if not item["help"]] == []
    assert err == ""


def test_config_validate(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = home / "good.toml", home / "bad.toml"
    good.write_text("[log]\nlevel = 'debug'\n")
    bad.write_text("[log]\nlevll = 'debug'\n")
    assert main(["config", "validate", str(good)]) == 0
    assert capsys.readouterr().err == f"valid: {good}\n"
    assert main(["config", "validate", str(bad)]) == 1
    assert capsys.readouterr() == (
        "",
        f"everstep: {bad}: log.levll is not a setting; did you mean log.level?\n",
    )
    assert main(["config", "validate"]) == 0
    assert capsys.readouterr().err == "valid: no file, only defaults\n"


def test_config_path(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "path"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "there is no everstep.toml; looked for /etc/everstep/everstep.toml," in err
    Path("everstep.toml").write_text("")
    assert main(["config", "path"]) == 0
    assert capsys.readouterr().out == "everstep.toml\n"


def test_wrong_settings_end_any_command_in_one_line(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVERSTEP_BUS__URI", "x")
    assert main(["bus", "info"]) == 2
    assert capsys.readouterr().err == (
        "everstep: EVERSTEP_BUS__URI is not a setting; did you mean EVERSTEP_BUS__URL?\n"
    )


def test_output_that_nobody_takes_is_no_traceback() -> None:
    command = [sys.executable, "-m", "everstep_services.cli", "--help"]
    with open("/dev/full", "wb") as full:
        refused = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
    assert refused.returncode == 1
    assert refused.stderr == b"everstep: what is printed: No space left on device\n"
    reading, writing = os.pipe()
    os.close(reading)
    unread = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert unread.stderr == b""


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        *((name, "JOB") for name in ("stop", "restart", "save", "nodes", "goodput", "network")),
        *((name, "NODE") for name in ("drain", "node show", "network llama")),
        *((name, "WHERE") for name in ("ckpt verify", "ckpt ls")),
        *((name, "JOB|INCIDENT") for name in ("why", "incident")),
        ("jobs --api", "--api"),
        ("drain n3 --job", "--job"),
    ],
)
def test_an_empty_name_is_refused(
    arguments: str, what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments.split(), ""]) == Exit.USAGE
    assert f"everstep: {what} is empty: give it a name" in capsys.readouterr().err


def _parameters(command: click.Command) -> Iterator[click.Parameter]:
    yield from command.params
    for one in getattr(command, "commands", {}).values():
        yield from _parameters(one)


@pytest.mark.parametrize("name", NAMES)
def test_a_command_takes_no_empty_name_of_a_job_or_node(name: str) -> None:
    command = everstep.get_command(click.Context(everstep), name)
    assert command is not None
    named = {"job", "node", "nodes", "where", "named", "incident", "api"}
    for parameter in _parameters(command):
        if parameter.name in named and not getattr(parameter, "is_flag", False):
            assert parameter.type is NAME, f"{name}: {parameter.name}"
