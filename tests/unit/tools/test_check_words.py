"""The rules about names and prose: each finds what it bans, and each exception must be in use."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tools import check_words
from tools.check_words import Complaint, complaints, configuration, subject_complaints

RULES = """
nouns = ["staging"]
folder_entries = 3
variables = ["one", "found"]

[[phrases]]
words = "whoever"
instead = "the caller"

[[phrases]]
words = "is said"
pattern = '\\b(?:is|are) said\\b'
instead = "is logged"
"""


def check(texts: Mapping[str, str], exceptions: str = "") -> list[Complaint]:
    return complaints(texts, configuration(RULES + exceptions))


def exception(rule: str, *, paths: str = "[]", names: str = "[]", reason: str = "debt") -> str:
    lines = f"rule = '{rule}'\npaths = {paths}\nnames = {names}\nreason = '{reason}'\n"
    return f"\n[[exceptions]]\n{lines}"


@pytest.mark.parametrize(
    "path", ["libs/keeping.py", "libs/a/gpu_reading.py", "services/running/plan.py"]
)
def test_a_gerund_as_the_name_of_a_module_or_folder_is_found(path: str) -> None:
    (complaint,) = check({path: ""})
    assert complaint.rule == "gerund"


@pytest.mark.parametrize(
    "path", ["libs/staging.py", "trainer_sdk/layout.py", "tests/waiting.py", "docs/training.md"]
)
def test_nouns_and_modules_outside_the_product_are_allowed(path: str) -> None:
    assert check({path: ""}) == []


def test_a_class_name_of_two_modules_is_found_and_names_both() -> None:
    (complaint,) = check({"libs/a.py": "class Place:\n", "services/b.py": "\nclass Place(X):\n"})
    assert (complaint.rule, complaint.name, complaint.path) == ("class", "Place", "services/b.py")
    assert "libs/a.py" in complaint.text


def test_a_message_and_its_rest_resource_may_share_a_name() -> None:
    pair = {
        "libs/everstep/messages/rounds.py": "class Member(Struct):\n",
        "services/everstep_services/history/api/dto/jobs.py": "class Member(Model):\n",
    }
    assert check(pair) == []
    assert len(check(pair | {"libs/everstep/archive.py": "class Member:\n"})) == 1


def test_private_and_inner_classes_may_share_a_name() -> None:
    text = "class _Place:\n    class Inner:\n        pass\n"
    assert check({"libs/a.py": text, "libs/b.py": text}) == []


def test_a_folder_counts_files_and_folders_but_not_its_init() -> None:
    folder = {
        f"tests/e2e/{name}": "" for name in ("__init__.py", "a.py", "b.py", "c/d.py", "c/e.py")
    }
    assert check(folder) == []
    (complaint,) = check(folder | {"tests/e2e/f.py": ""})
    assert (complaint.rule, complaint.path) == ("folder", "tests/e2e")


@pytest.mark.parametrize(
    "text",
    [
        "Whoever asks.\n",
        "a line\n# that is\n# said once\n",
        'print("it is " \n    f"said")\n',
        "they are\n    said",
    ],
)
def test_a_phrase_is_found_over_line_breaks_too(text: str) -> None:
    for path in ("libs/a.py", "docs/guides/a.md", "CHANGELOG.md", "services/s/README.md"):
        (complaint,) = check({path: text})
        assert complaint.rule == "phrase"


def test_a_phrase_has_its_line() -> None:
    (complaint,) = check({"README.md": "one\n\nIt is said.\n"})
    assert str(complaint) == "README.md:3: “is said”: write is logged"


@pytest.mark.parametrize("path", ["docs/reference/cli.md", "tests/unit/test_a.py"])
def test_generated_pages_and_tests_are_not_read_for_phrases(path: str) -> None:
    assert check({path: "whoever"}) == []


@pytest.mark.parametrize(
    "line",
    [
        "    found = 1",
        "found: list[int] = []",
        "for one in many:",
        "def f(a: int, one: int) -> None:",
        "with open(p) as found:",
    ],
)
def test_a_variable_that_is_no_noun_is_found(line: str) -> None:
    (complaint,) = check({"libs/a.py": f"{line}\n"})
    assert complaint.rule == "variable"


@pytest.mark.parametrize("line", ["f(found=1)", "x.found = 1", "# one: a number", "one == 1"])
def test_other_uses_of_these_words_are_allowed(line: str) -> None:
    assert check({"libs/a.py": f"{line}\n"}) == []


GLOSSARY = "| word | meaning |\n|---|---|\n| warm, cold | … |\n| probe (of a node) | … |\n"


def test_a_word_that_no_other_page_uses_is_found_with_its_line() -> None:
    pages = {"docs/concepts/words.md": GLOSSARY, "docs/guides/a.md": "Warm ranks, and probes."}
    (complaint,) = check(pages)
    assert (complaint.rule, complaint.name, complaint.line) == ("word", "cold", 3)


def test_a_word_may_have_two_meanings_if_each_row_tells_which() -> None:
    pages = {"docs/guides/a.md": "warm, cold, probe"}
    second = GLOSSARY + "| probe (of an agent) | … |\n"
    assert check(pages | {"docs/concepts/words.md": second}) == []
    (complaint,) = check(pages | {"docs/concepts/words.md": GLOSSARY + "| cold | … |\n"})
    assert "twice" in complaint.text


def test_an_exception_allows_its_rule_for_its_paths_and_names_alone() -> None:
    texts = {"libs/a/keeping.py": "found = 1\n", "libs/b.py": "found = 1\n"}
    allowed = exception("variable", paths='["libs/a/*"]', names='["found"]')
    rules = {(complaint.rule, complaint.path) for complaint in check(texts, allowed)}
    assert rules == {("gerund", "libs/a/keeping.py"), ("variable", "libs/b.py")}


def test_each_path_and_name_of_an_exception_that_allows_nothing_is_an_error() -> None:
    allowed = exception("gerund", paths='["libs/keeping.py", "libs/gone.py"]')
    (complaint,) = check({"libs/keeping.py": ""}, allowed)
    assert complaint.path == "check_words.toml"
    assert "'libs/gone.py'" in complaint.text


@pytest.mark.parametrize(
    "text",
    [
        exception("gerund", paths='["libs/a.py"]', reason=" "),
        exception("gerund"),
        exception("spelling", paths='["libs/a.py"]'),
    ],
)
def test_an_exception_has_a_known_rule_something_it_allows_and_a_reason(text: str) -> None:
    with pytest.raises(ValueError, match="exception"):
        configuration(RULES + text)


@pytest.mark.parametrize(
    "subject",
    ["words: add a check of names", "Merge branch 'main'", "fixup! add", f"a: {'b' * 69}"],
)
def test_a_good_subject_passes(subject: str) -> None:
    assert subject_complaints(f"{subject}\n\nwhy. It is long.\n") == []


@pytest.mark.parametrize(
    "subject", ["add a check", "Words: add a check", "words: add a check.", f"a: {'b' * 70}", ""]
)
def test_a_bad_subject_is_refused(subject: str) -> None:
    assert len(subject_complaints(f"{subject}\n")) == 1


def test_the_hook_reads_the_file_of_the_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = tmp_path / "COMMIT_EDITMSG"
    message.write_text("add\n", encoding="utf-8")
    assert check_words.main(["--subject", str(message)]) == 1
    assert "the thing, then the change" in capsys.readouterr().err
    message.write_text("words: add a hook\n", encoding="utf-8")
    assert check_words.main(["--subject", str(message)]) == 0


def test_the_configuration_of_this_tree_can_be_read() -> None:
    rules = configuration(check_words.CONFIGURATION.read_text(encoding="utf-8"))
    assert rules.folder_entries == 25
