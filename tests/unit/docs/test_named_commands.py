"""Each command and option that a page, or a message of ours, tells people to use exists."""

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from everstep_services.cli.group import command_files, everstep

ROOT = Path(__file__).parents[3]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), *ROOT.glob("*.md")])
SOURCES = sorted([*(ROOT / "services").rglob("*.py"), *(ROOT / "trainer_sdk").rglob("*.py")])
_CONSOLE = re.compile(r"^\$ everstep (.+)$", re.MULTILINE)
_INLINE = re.compile(r"`everstep ([^`\n]+)`")
_OPTION = re.compile(r"--[a-z][a-z0-9-]*")


def named(text: str) -> Iterator[str]:
    """What stands after `everstep` in commands, up to a pipe or a redirection."""
    for pattern in (_CONSOLE, _INLINE):
        for match in pattern.finditer(text):
            yield re.split(r"\s[|>&#]|;|\s--(?=\s|$)|…", match[1])[0].strip()


def problem(words: list[str]) -> str:
    """Which of the words no command knows; empty if all are known."""
    context, command = click.Context(everstep), None
    group: click.Command = everstep
    while words and isinstance(group, click.Group):
        name = words[0].split("/")[0]
        if not re.fullmatch(r"[a-z][a-z-]*", name):
            return ""  # a placeholder
        command = group.get_command(context, name)
        if command is None:
            has_default = group is not everstep and type(group) is not click.Group
            return "" if has_default else f"no command {name!r}"  # as in `everstep logs JOB`
        words, group = words[1:], command
    if command is None or command.name == "run":  # its options are read by `scan`, and its script's
        return ""
    known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)} | {
        "--help"
    }
    options = [match[0] for word in words if (match := _OPTION.match(word))]
    unknown = [option for option in options if option not in known]
    return f"no option {unknown[0]}" if unknown else ""


def test_what_is_wrong_would_be_found() -> None:
    assert list(named("$ everstep jobs | head\nsee `everstep why JOB`, everstep x")) == [
        "jobs",
        "why JOB",
    ]
    assert problem(["attach"]) == "no command 'attach'"
    assert problem(["slurm", "prologue"]) == "no command 'prologue'"
    assert problem(["slurm", "prolog", "--witin", "3"]) == "no option --witin"
    assert problem(["slurm", "prolog", "--within", "3"]) == problem(["why", "JOB"]) == ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_on_pages_exist(page: Path) -> None:
    wrong = {line: problem(line.split()) for line in named(page.read_text(encoding="utf-8"))}
    assert {line: text for line, text in wrong.items() if text} == {}


def test_commands_in_messages_exist() -> None:
    """Every remedy that names a command; the words of one may be filled in."""
    wrong = [
        f"{path.relative_to(ROOT)}: everstep {match[1]}"
        for path in SOURCES
        for match in re.finditer(r"`everstep ([a-z][a-z-]*)", path.read_text(encoding="utf-8"))
        if match[1] not in command_files()
    ]
    assert wrong == []
