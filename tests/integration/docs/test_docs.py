"""What the documentation says exists, what exists is documented, and its examples run."""

import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from docs import generate
from docs.generators import cli as cli_page
from docs.generators import metrics as metrics_page
from docs.generators import rest as rest_page
from everstep.settings import leaves
from everstep_services.cli.errors import Exit
from everstep_services.cli.group import everstep
from everstep_services.cli.settings_sections import known_sections
from tests.e2e import lifeline
from tests.waiting import until

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
WRITTEN = [page for page in PAGES if REFERENCE not in page.parents]
WITHIN_S = 50

_FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.M | re.S)
_LINK = re.compile(r"(?<!!)\[[^\]\n]*\]\(([^)\s]+)\)")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, language: str) -> list[str]:
    """The contents of a page's fenced blocks in one language."""
    found = _FENCE.findall(page.read_text(encoding="utf-8"))
    return [body for said, body in found if said == language]


def invocations(page: Path) -> Iterator[list[str]]:
    """The arguments of each `everstep` in a page's console blocks, wherever on its line."""
    for block in blocks(page, "console"):
        for line in block.splitlines():
            if line.startswith("$ "):
                yield from _invocations(line[2:])


def _invocations(line: str) -> Iterator[list[str]]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars="();<>|&")
    lexer.whitespace_split = True
    words: list[str] | None = None
    inner = re.findall(r"\$\((everstep [^)|]*)", line)
    for word in [*lexer, ";"]:
        if re.fullmatch(r"[();<>|&]+", word):
            if words is not None:
                yield words
            words = None
        elif word == "everstep" and words is None:
            words = []
        elif words is not None:
            words.append(word)
    for said in inner:
        yield shlex.split(said)[1:]


def test_generated_pages_are_what_the_code_says_now() -> None:
    assert generate.stale(generate.PAGES, generate.ROOT) == [], "run docs/generate.py"


def test_generated_pages_are_the_same_each_time() -> None:
    assert all(made() == made() for _, made in generate.PAGES)


def test_every_setting_is_documented_with_its_meaning() -> None:
    text = (REFERENCE / "settings.md").read_text(encoding="utf-8")
    sections, missing = known_sections()
    assert not missing
    settings = [leaf for section, of in sections.items() for leaf in leaves(of, section)]
    assert [one.key for one in settings if f"`{one.variable}`" not in text] == []
    assert [one.key for one in settings if not one.help] == []


def test_every_command_option_and_exit_code_is_documented() -> None:
    text = (REFERENCE / "cli.md").read_text(encoding="utf-8")
    contexts = list(cli_page.commands(click.Context(everstep, info_name="everstep")))
    assert len(contexts) > 10
    for context in contexts:
        assert f"## {context.command_path}\n" in text
        for option in context.command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert all(written in text for written in option.opts), option.opts
    assert set(cli_page.MEANINGS) == set(Exit)
    for code in Exit:
        assert f"| {code.value} |" in text


def test_every_path_of_rest_is_documented_with_the_scope_it_needs() -> None:
    text = (REFERENCE / "rest.md").read_text(encoding="utf-8")
    paths: dict[str, Any] = rest_page.document()["paths"]
    for path, methods in paths.items():
        for method in methods:
            reads = method == "get" or path.endswith("/login-codes")  # a code has its asker's scope
            scope = "admin" if "/tokens" in path else "read" if reads else "operate"
            if "/webhooks/" in path and not reads and not path.endswith(":cancel"):
                scope = "webhook"
            assert f"`{method.upper()} {path}` · scope `{scope}`" in text


def test_openapi_is_valid_json_and_names_no_host() -> None:
    read = json.loads((REFERENCE / "openapi.json").read_text(encoding="utf-8"))
    assert read["openapi"].startswith("3.")
    assert "servers" not in read


def test_every_metric_has_a_meaning_and_no_meaning_is_left_over() -> None:
    found = {metrics_page.name_of(family): family for family in metrics_page.families()}
    counted = {one for one in found if one.startswith(("everstep_history_", "everstep_bus_"))}
    assert counted - set(metrics_page.MEANINGS) == set()
    assert set(metrics_page.MEANINGS) - set(found) == set()


def test_names_of_metrics_have_whole_units() -> None:
    """As `promtool check metrics` demands: `_seconds` and `_bytes`, never `_s` or `_ms`."""
    short = re.compile(r"_(s|ms|us|ns|m|h|b|kb|mb|gb)(_|$)")
    names = [metrics_page.name_of(family) for family in metrics_page.families()]
    assert len(names) > 100
    assert [name for name in names if short.search(name)] == []


def test_metrics_that_pages_speak_of_exist() -> None:
    found = {metrics_page.name_of(family) for family in metrics_page.families()}
    for page in WRITTEN:
        text = page.read_text(encoding="utf-8")
        said = set(re.findall(r"\beverstep_(?:bus|history|loop|build)_[a-z_]+", text))
        assert said - found == set(), name(page)


@pytest.mark.parametrize("page", WRITTEN, ids=name)
def test_commands_in_console_blocks_exist_with_these_options(page: Path) -> None:
    for arguments in invocations(page):
        with everstep.make_context("everstep", list(arguments)) as context:
            _parse(everstep, context, arguments)


def _parse(command: click.Command, context: click.Context, said: list[str]) -> None:
    """Parse as click would, down to the last command, and run nothing."""
    while isinstance(command, click.Group):
        _, found, rest = command.resolve_command(context, [*context._protected_args, *context.args])
        assert found is not None, f"no such command: everstep {' '.join(said)}"
        command = found
        context = command.make_context(command.name, rest, parent=context)


def test_every_settings_variable_in_a_page_exists() -> None:
    sections, _ = known_sections()
    known = {leaf.variable for section, of in sections.items() for leaf in leaves(of, section)}
    for page in WRITTEN:
        said = set(re.findall(r"EVERSTEP_[A-Z]+__[A-Z_]+", page.read_text(encoding="utf-8")))
        assert said - known == set(), name(page)


def test_the_readme_begins_with_the_two_commands() -> None:
    first, *_ = blocks(ROOT / "README.md", "console")
    assert first.splitlines() == ["$ make demo", "$ make test"]


def test_make_targets_in_pages_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    for page in WRITTEN:
        text = page.read_text(encoding="utf-8")
        said = set(re.findall(r"(?:^\$ |`)make ([a-z-]+)", text, re.M))
        assert said - targets == set(), name(page)


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    text = _FENCE.sub("", page.read_text(encoding="utf-8"))
    for link in _LINK.findall(text):
        if re.match(r"[a-z]+:", link):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), f"{name(page)} links to {link}"
        if anchor and target.suffix == ".md":
            assert anchor in anchors(target), f"{name(page)} links to {link}"


def anchors(page: Path) -> set[str]:
    """Where a link may lead in a page, as mkdocs and GitHub name its headings."""
    titles = re.findall(r"^#+ (.+)$", _FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    found = set()
    for title in titles:
        given = re.search(r"\{ #([\w-]+) \}$", title)
        plain = re.sub(r"[^\w\s-]", "", title.replace("`", "")).strip().lower()
        found.add(given[1] if given else re.sub(r"\s+", "-", plain))
    return found


def test_decisions_are_numbered_once_and_all_of_them_are_listed() -> None:
    files = sorted(path.name for path in (DOCS / "adr").glob("[0-9]*.md"))
    assert files
    numbers = Counter(file[:4] for file in files)
    assert [number for number, times in numbers.items() if times > 1] == []
    listed = _LINK.findall((DOCS / "adr/README.md").read_text(encoding="utf-8"))
    assert sorted(listed) == files


def test_the_first_page_shows_in_pictures_what_it_does() -> None:
    """A killed rank on a timeline, an incident and slow ranks come before any list of links."""
    page = (DOCS / "index.md").read_text(encoding="utf-8")
    pictures = re.findall(r"^!\[(.{20,})\]\((images/[a-z-]+\.png)\)$", page, re.M)
    assert len(pictures) >= 4
    assert page.index("![") < page.index("\n|")
    made = (ROOT / "docs/pictures.py").read_text(encoding="utf-8")
    test = re.search(r'TEST = "([^:]+)::(\w+)"', made)
    assert test is not None
    source = (ROOT / test[1]).read_text(encoding="utf-8").partition(test[2])[2]
    for picture in (DOCS / "images").iterdir():
        assert picture.suffix == ".png"
        name = picture.stem.removeprefix("dashboard-")
        assert f'"{name}"' in source, f"nothing makes {picture.name} again"
        texts = (text.read_text(encoding="utf-8") for text in WRITTEN)
        assert any(picture.name in text for text in texts), f"no page shows {picture.name}"


def test_pages_name_no_other_sites_for_what_a_browser_loads() -> None:
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert re.search(r"^  font: false\b", config, re.M)
    assert not re.search(r"https?://", config)


RUN_ELSEWHERE = {DOCS / f"guides/{name}.md" for name in ("analyzers", "frameworks", "mcp")}
"""Their examples run in tests of their own: a guide's package, and extras that may be missing."""


@pytest.mark.parametrize("page", [page for page in WRITTEN if page not in RUN_ELSEWHERE], ids=name)
def test_python_in_pages_is_python_and_imports_what_exists(page: Path) -> None:
    for block in blocks(page, "python"):
        imports = [line for line in block.splitlines() if re.match(r"(from|import) ", line)]
        compile(block, name(page), "exec")
        exec("\n".join(imports), {})


def test_the_recorded_fact_of_the_guide_is_read_back(tmp_path: Path) -> None:
    """The example of `record-a-fact.md` runs as printed."""
    state = tmp_path / "state"
    own = {"HOME": str(tmp_path), "EVERSTEP_STATE_DIR": str(state)}
    environ = {**lifeline.bare_environment(), **own}

    def run(*arguments: str, **more: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            env={**environ, **more},
            cwd=tmp_path,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    (example,) = blocks(DOCS / "guides/record-a-fact.md", "python")
    (tmp_path / "record.py").write_text(example)
    command = ("-m", "everstep_services.cli")
    run(*command, "up", "--detach", "--port", "0")
    try:
        status = json.loads(run(*command, "status", "-o", "json"))
        run(
            "record.py",
            EVERSTEP_BUS__URL=status["bus"],
            EVERSTEP_BUS__CREDENTIALS_FILE=str(state / "nats" / "service.creds"),
        )
        told = until(
            lambda: run(*command, "facts", "--job", "llama-8b", "-o", "jsonl"), "history has it"
        )
    finally:
        run(*command, "down")
    found = json.loads(told)
    assert (found["kind"], found["node"], found["body"]["signal"]) == (
        "rank_exited",
        "node-07",
        "SIGKILL",
    )
