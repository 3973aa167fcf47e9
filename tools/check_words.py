"""Checks names and prose against the rules that keep the code readable; `make check` runs it.

It fails on a module whose name is a gerund, on a public class name that two modules use, on a
folder with too many entries, on phrases and variable names that readers stumble over, and on a
word of `docs/concepts/words.md` that no other page uses, or that is there twice.
`check_words.toml` holds the phrases and the exceptions; each exception has a reason, and one that
allows nothing is an error too, so that the list only shrinks. With `--subject FILE` it checks the
first line of a commit message.
"""

import fnmatch
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, Literal, get_args

ROOT = Path(__file__).resolve().parent.parent
CONFIGURATION = Path(__file__).with_suffix(".toml")

Rule = Literal["gerund", "class", "folder", "phrase", "variable", "word"]

PRODUCT = ("libs/", "services/", "trainer_sdk/")
PAGES = ("docs/", "README.md", "CHANGELOG.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")
GENERATED = ("docs/reference/",)
GLOSSARY = "docs/concepts/words.md"
MESSAGES = "libs/everstep/messages/"
RESOURCES = "services/everstep_services/history/api/dto/"
SUBJECT_LENGTH = 72

_CLASS = re.compile(r"^class ([A-Z]\w*)", re.MULTILINE)
_GAP = (
    r"""(?:[\s#*"']|(?<=\s)f")+"""  # words of a phrase may be on two lines of a comment or string
)


@dataclass(frozen=True, slots=True)
class Complaint:
    """Something that breaks a rule: where, and what to do about it."""

    rule: Rule
    path: str
    name: str  # the phrase, the class or the variable; empty for a folder
    text: str
    line: int | None = None

    def __str__(self) -> str:
        place = self.path if self.line is None else f"{self.path}:{self.line}"
        return f"{place}: {self.text}"


@dataclass(slots=True)
class Permission:
    """An exception of the configuration, and whether it has allowed anything."""

    rule: Rule
    paths: tuple[str, ...]
    names: tuple[str, ...]
    reason: str
    used: set[str] = field(default_factory=set)

    def allows(self, complaint: Complaint) -> bool:
        """Note that it is in use, too."""
        if complaint.rule != self.rule:
            return False
        matches = [path for path in self.paths if fnmatch.fnmatchcase(complaint.path, path)]
        if (self.paths and not matches) or (self.names and complaint.name not in self.names):
            return False
        self.used.update(matches, [complaint.name])
        return True

    def stale(self) -> list[str]:
        """Return the paths and names that no longer need an exception."""
        return [entry for entry in (*self.paths, *self.names) if entry not in self.used]


@dataclass(frozen=True, slots=True)
class Phrase:
    """Words that readers stumble over, and what to write instead."""

    words: str
    instead: str
    pattern: re.Pattern[str]


@dataclass(frozen=True, slots=True)
class Configuration:
    """What `check_words.toml` says."""

    nouns: frozenset[str]
    folder_entries: int
    phrases: tuple[Phrase, ...]
    variables: tuple[str, ...]
    permissions: tuple[Permission, ...]


def configuration(text: str) -> Configuration:
    """Raise ValueError for an exception without a reason or of an unknown rule."""
    tables = tomllib.loads(text)
    return Configuration(
        nouns=frozenset(tables["nouns"]),
        folder_entries=tables["folder_entries"],
        phrases=tuple(_phrase(table) for table in tables["phrases"]),
        variables=tuple(tables["variables"]),
        permissions=tuple(_permission(table) for table in tables.get("exceptions", ())),
    )


def _phrase(table: Mapping[str, str]) -> Phrase:
    words = table["words"]
    pattern = table.get("pattern", rf"\b{words}\b")
    return Phrase(words, table["instead"], re.compile(pattern.replace(" ", _GAP), re.IGNORECASE))


def _permission(table: Mapping[str, Any]) -> Permission:
    unknown = table.keys() - {"rule", "paths", "names", "reason"}
    rule: Any = table.get("rule")
    if unknown or rule not in get_args(Rule):
        raise ValueError(f"exception {dict(table)}: its rule is one of {get_args(Rule)}")
    paths, names = tuple(table.get("paths", ())), tuple(table.get("names", ()))
    if not (paths or names) or not table.get("reason", "").strip():
        raise ValueError(f"exception {dict(table)}: it needs paths or names, and a reason")
    return Permission(rule, paths, names, table["reason"])


def complaints(texts: Mapping[str, str], rules: Configuration) -> list[Complaint]:
    """Return what breaks a rule without an exception, and the exceptions that allow nothing."""
    every = [
        *_gerunds(texts, rules),
        *_classes(texts),
        *_folders(texts, rules),
        *_words(texts, rules),
        *_glossary(texts),
    ]
    remaining = [complaint for complaint in every if not _is_allowed(complaint, rules.permissions)]
    unused = [
        (permission, entry) for permission in rules.permissions for entry in permission.stale()
    ]
    return remaining + [_unused(permission, entry) for permission, entry in unused]


def _is_allowed(complaint: Complaint, permissions: Sequence[Permission]) -> bool:
    # Two exceptions may allow the same complaint: both are in use, so all of them are asked.
    answers = [permission.allows(complaint) for permission in permissions]
    return any(answers)


def _unused(permission: Permission, entry: str) -> Complaint:
    text = f"the exception {entry!r} of rule {permission.rule} allows nothing any more: delete it"
    return Complaint(permission.rule, CONFIGURATION.name, entry, text)


def _gerunds(texts: Mapping[str, str], rules: Configuration) -> Iterator[Complaint]:
    modules = {PurePosixPath(path) for path in texts if _is_module(path)}
    for path in sorted(modules | {folder for module in modules for folder in module.parents}):
        last_word = path.stem.rpartition("_")[2]
        if last_word.endswith("ing") and last_word not in rules.nouns:
            text = "a module is a noun: name it after its main class or its topic"
            yield Complaint("gerund", str(path), last_word, text)


def _classes(texts: Mapping[str, str]) -> Iterator[Complaint]:
    """Complain of names that two modules use; a message and its REST resource may share one."""
    modules: defaultdict[str, list[str]] = defaultdict(list)
    for path in sorted(filter(_is_module, texts)):
        for name in _CLASS.findall(texts[path]):
            modules[name].append(path)
    for name, paths in sorted(modules.items()):
        sides = [_side(path) for path in paths]
        if len(sides) > 1 and (len(set(sides)) < len(sides) or "product" in sides):
            text = f"another class has the name {name}, too: {', '.join(paths[:-1])}"
            yield Complaint("class", paths[-1], name, text)


def _side(path: str) -> Literal["message", "resource", "product"]:
    if path.startswith(MESSAGES):
        return "message"
    return "resource" if path.startswith(RESOURCES) else "product"


def _folders(texts: Mapping[str, str], rules: Configuration) -> Iterator[Complaint]:
    entries: defaultdict[str, set[str]] = defaultdict(set)
    for path in texts:
        parts = PurePosixPath(path).parts
        for depth in range(1, len(parts)):
            if parts[depth] != "__init__.py":
                entries["/".join(parts[:depth])].add(parts[depth])
    for folder, names in sorted(entries.items()):
        if len(names) > rules.folder_entries:
            text = f"{len(names)} entries, and {rules.folder_entries} at most: group by topic"
            yield Complaint("folder", folder, "", text)


def _words(texts: Mapping[str, str], rules: Configuration) -> Iterator[Complaint]:
    variables = _variables(rules.variables)
    for path, text in sorted(texts.items()):
        is_module = _is_module(path)
        if not (is_module or _is_page(path)):
            continue
        for phrase in rules.phrases:
            for match in phrase.pattern.finditer(text):
                advice = f"“{' '.join(match[0].split())}”: write {phrase.instead}"
                yield Complaint("phrase", path, phrase.words, advice, _line(text, match))
        if is_module:
            for match in variables.finditer(text):
                name = next(filter(None, match.groups()))
                advice = f"a variable is a noun: rename {name}"
                yield Complaint("variable", path, name, advice, _line(text, match))


def glossary_terms(text: str) -> Iterator[tuple[int, str]]:
    """Return each term of the tables of words, with its line; two may share a row."""
    for number, line in enumerate(text.splitlines(), start=1):
        cell = line.removeprefix("|").partition("|")[0].strip()
        if line.startswith("|") and cell != "word" and cell.strip("-:"):
            yield from ((number, term) for term in cell.split(", "))


def _glossary(texts: Mapping[str, str]) -> Iterator[Complaint]:
    pages = [text for path, text in texts.items() if _is_page(path) and path != GLOSSARY]
    seen: set[str] = set()
    for line, term in glossary_terms(texts.get(GLOSSARY, "")):
        if term in seen:
            text = f"{term} is there twice: one definition, or a bracket that tells which is meant"
            yield Complaint("word", GLOSSARY, term, text, line)
        seen.add(term)
        plain = re.escape(term.partition(" (")[0])
        use = re.compile(rf"\b{plain}\w*", re.IGNORECASE)
        if not any(use.search(page) for page in pages):
            text = f"no other page uses {term}: delete it, or use it"
            yield Complaint("word", GLOSSARY, term, text, line)


def _variables(names: Sequence[str]) -> re.Pattern[str]:
    any_name = "|".join(map(re.escape, names))
    assigned = rf"^ *({any_name})(?:: [^=\n]+)? = "
    return re.compile(
        rf"{assigned}|\bfor ({any_name}) in\b|[(,]\s*({any_name}): |\bas ({any_name}):",
        re.MULTILINE,
    )


def _line(text: str, match: re.Match[str]) -> int:
    return text.count("\n", 0, match.start()) + 1


def _is_page(path: str) -> bool:
    is_written = path.startswith((*PRODUCT, *PAGES)) and not path.startswith(GENERATED)
    return is_written and path.endswith(".md")


def _is_module(path: str) -> bool:
    return path.startswith(PRODUCT) and path.endswith(".py")


_SUBJECT = re.compile(r"[a-z0-9][\w ./-]*: [a-z]")


def subject_complaints(message: str) -> list[str]:
    """Return what is wrong with the first line of a commit message; git's own lines pass."""
    subject = message.partition("\n")[0].rstrip()
    if subject.startswith(("Merge ", "Revert ", "fixup! ", "squash! ")):
        return []
    return [
        text
        for is_wrong, text in (
            (len(subject) > SUBJECT_LENGTH, f"at most {SUBJECT_LENGTH} characters: {len(subject)}"),
            (not _SUBJECT.match(subject), "the thing, then the change: “history: add …”"),
            (subject.endswith("."), "no full stop at its end"),
        )
        if is_wrong
    ]


def tracked(root: Path) -> list[str]:
    """Return the files that git tracks below `root`, or would add, and that are there."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return sorted({path for path in listed.stdout.split("\0") if path and (root / path).is_file()})


def read(root: Path, paths: Iterable[str]) -> dict[str, str]:
    """Return the text of modules and pages; of other files only the path is of interest."""
    return {
        path: (root / path).read_text(encoding="utf-8") if _is_read(path) else "" for path in paths
    }


def _is_read(path: str) -> bool:
    return _is_module(path) or _is_page(path)


def main(arguments: Sequence[str]) -> int:
    """Print what is wrong, one line each, and return the exit code."""
    if arguments[:1] == ["--subject"]:
        message = Path(arguments[1]).read_text(encoding="utf-8")
        wrong = [f"commit subject: {text}" for text in subject_complaints(message)]
    else:
        rules = configuration(CONFIGURATION.read_text(encoding="utf-8"))
        wrong = [str(complaint) for complaint in complaints(read(ROOT, tracked(ROOT)), rules)]
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
