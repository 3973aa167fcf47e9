"""Compares what others rely on with the release before; `make check` runs it.

    python tools/compatibility.py

It reads the generated references, the page layout and the migrations here and at the commit that
`last_release.toml` names. What was there and is gone, takes less, gives less or asks for more is an
error, unless that file lists the name with a reason; a listed name that breaks nothing is an error,
too. Exit code 1 names each; 3 means that the commit is not in this clone.
"""

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

ROOT = Path(__file__).resolve().parent.parent
RELEASE = Path(__file__).with_name("last_release.toml")
MIGRATIONS = "libs/everstep/store/migrations/versions"
NOT_COMPARED = 3

Way = Literal["in", "out", "both"]
"""Who depends on it: those who send it, those who get it, or both."""


@dataclass(frozen=True, slots=True)
class Element:
    """A field, argument or option: the kinds of value that it may have."""

    kinds: frozenset[str] = frozenset()
    is_required: bool = False


_UNIONS = ("anyOf", "oneOf", "allOf")
_PLACES = re.compile(r"(?:\[\d*\]|\{\})+$")
Surface = dict[tuple[Way, str], Element]
Node = Mapping[str, Any]


def breaks(before: Surface, after: Surface) -> dict[str, str]:
    """What would break somebody who relies on `before`: a sentence for each name."""
    broken: dict[str, str] = {}
    gone = before.keys() - after.keys()
    for (way, name), old in before.items():
        new = after.get((way, name))
        reason = "is gone" if new is None else _reason(way, old, new)
        if reason and (way, _owner(name)) not in gone:
            broken[name] = reason
    for way, name in after.keys() - before.keys():
        is_asked_for = way != "out" and after[way, name].is_required
        if is_asked_for and (way, _owner(name)) in before:
            broken[name] = "is new, and must be given"
    return broken


def _owner(name: str) -> str:
    """What the name is a part of."""
    return _PLACES.sub("", name.rpartition(" > ")[0])


def _reason(way: Way, old: Element, new: Element) -> str:
    lost, added = old.kinds - new.kinds, new.kinds - old.kinds
    words = {kind for kind in added if kind.startswith("=")}  # sets of words are open for readers
    if way != "out" and lost:
        return f"no longer takes {', '.join(sorted(lost))}"
    if way != "in" and added - words:
        return f"may now be {', '.join(sorted(added - words))}"
    if way != "out" and new.is_required and not old.is_required:
        return "must now be given"
    if way != "in" and old.is_required and not new.is_required:
        return "may now be missing"
    return ""


# ---- what is compared


def surface(read: Callable[[str], str]) -> Surface:
    """All of it; `read` returns the text of a file, and an empty text for one that is not there."""
    elements: Surface = {}
    for path, reader in _READERS.items():
        if text := read(path):
            elements |= dict(reader(text))
    return elements


Elements = Iterator[tuple[tuple[Way, str], Element]]


def _rest(text: str) -> Elements:
    document = json.loads(text)
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            name = f"{method.upper()} {path}"
            yield ("in", name), Element()
            for given in operation.get("parameters", ()):
                element = Element(_kinds(document, given["schema"]), given.get("required", False))
                yield ("in", f"{name} > {given['name']}"), element
            for content in operation.get("requestBody", {}).get("content", {}).values():
                yield from _fields(document, content["schema"], "in", name)
            for code, answer in operation["responses"].items():
                if code.startswith("2"):
                    yield ("out", f"{name} > {code}"), Element()
                    for content in answer.get("content", {}).values():
                        schema = content.get("schema", {})
                        yield from _fields(document, schema, "out", f"{name} > {code}")


def _messages(text: str) -> Elements:
    document = json.loads(text)
    for channel in document["channels"].values():
        for message in channel["messages"]:
            name = document["components"]["messages"][message]["name"]
            yield ("both", f"{channel['address']} > {name}"), Element()
    for message in document["components"]["messages"].values():
        yield ("both", message["name"]), Element()
        yield from _fields(document, message["payload"], "both", message["name"])


def _fields(
    document: Node, schema: Node, way: Way, owner: str, above: Sequence[str] = ()
) -> Elements:
    """Each field below a schema, by its path; a schema that contains itself is followed once."""
    unions = [each for key in _UNIONS for each in schema.get(key, ())]
    references = [each["$ref"] for each in (schema, *unions) if "$ref" in each]
    if set(references) & set(above):
        return
    above = (*above, *references)
    variants = list(_variants(document, schema))
    objects = [variant for variant in variants if "properties" in variant]
    for name in sorted({name for variant in objects for name in variant["properties"]}):
        having = [variant for variant in objects if name in variant["properties"]]
        parts = [variant["properties"][name] for variant in having]
        needing = [variant for variant in having if name in variant.get("required", ())]
        kinds = frozenset().union(*(_kinds(document, part) for part in parts))
        yield (way, f"{owner} > {name}"), Element(kinds, len(needing) == len(objects))
        for part in parts:
            yield from _fields(document, part, way, f"{owner} > {name}", above)
    for variant in variants:
        for place, item in _items(variant):
            yield from _fields(document, item, way, f"{owner}{place}", above)


def _variants(document: Node, schema: Node) -> Iterator[Node]:
    """The schema without references and unions: what one value may look like."""
    if reference := schema.get("$ref"):
        target: Node = document
        for part in reference.removeprefix("#/").split("/"):
            target = target[part]
        yield from _variants(document, target)
        return
    unions = [schema[key] for key in _UNIONS if key in schema]
    if not unions:
        yield schema
    for union in unions:
        for each in union:
            yield from _variants(document, each)


def _items(schema: Node) -> Iterator[tuple[str, Node]]:
    """The schemas of the items of an array, a tuple or a mapping, and the place of each."""
    items = schema.get("items")
    for number, item in enumerate(items if isinstance(items, list) else ()):
        yield f"[{number}]", item
    for place, inner in (("[]", items), ("{}", schema.get("additionalProperties"))):
        if isinstance(inner, dict):
            yield place, inner


def _kinds(document: Node, schema: Node) -> frozenset[str]:
    kinds: set[str] = set()
    for variant in _variants(document, schema):
        if "enum" in variant or "const" in variant:
            kinds |= {f"={value}" for value in variant.get("enum", [variant.get("const")])}
            continue
        given = variant.get("type", "any")
        for kind in [given] if isinstance(given, str) else given:
            kinds.add(kind)
        for place, item in _items(variant):
            kinds |= {f"{place}{kind}" for kind in _kinds(document, item)}
    return frozenset(kinds)


def _names(pattern: str, prefix: str) -> Callable[[str], Elements]:
    """Each match in the text of a page is a name."""

    def elements(text: str) -> Elements:
        for match in re.finditer(pattern, text, re.MULTILINE):
            yield ("both", f"{prefix} {match[1]}"), Element()

    return elements


def _commands(text: str) -> Elements:
    yield from _names(r"^\| (\d+) \|", "exit code")(text)
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title = section.partition("\n")[0]
        yield ("in", title), Element()
        for cell in re.findall(r"^\| `([^`]+)`", section, re.MULTILINE):
            *options, values = re.split(r",? ", cell)
            if values.startswith("-"):
                options, values = [*options, values], ""
            kinds = frozenset(f"={value}" for value in values.split("/") if "/" in values)
            for option in options:
                yield ("in", f"{title} > {option}"), Element(kinds)


def _sdk(text: str) -> Elements:
    for name, arguments in json.loads(text).items():
        yield ("in", name), Element()
        for argument, words in (arguments or {}).items():
            kinds = frozenset(words) - {"required", "optional"}
            yield ("in", f"{name} > {argument}"), Element(kinds, "required" in words)


def _layout(text: str) -> Elements:
    for node in ast.parse(text).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = frozenset({f"={ast.unparse(node.value)}"})
            yield ("in", f"page {node.targets[0].id}"), Element(value)


_READERS: Mapping[str, Callable[[str], Elements]] = {
    "docs/reference/openapi.json": _rest,
    "docs/reference/asyncapi.json": _messages,
    "docs/reference/cli.md": _commands,
    "docs/guides/exit-codes-and-signals.md": _names(r"^\| (\d+) \|", "everstep run exits with"),
    "docs/reference/settings.md": _names(r"`(EVERSTEP_[A-Z]+__\w+)`", "setting"),
    "docs/reference/metrics.md": _names(r"^\| `(\w+)`", "metric"),
    "docs/reference/sdk.json": _sdk,
    "trainer_sdk/layout.py": _layout,
}


# ---- the two trees


def main() -> int:
    """Exit code: see above."""
    release = tomllib.loads(RELEASE.read_text())
    if _git("cat-file", "-e", release["commit"]) is None:
        print(f"not compared: {release['commit']} is not here: git fetch --unshallow")
        return NOT_COMPARED
    before = surface(lambda path: _git("show", f"{release['commit']}:{path}") or "")
    after = surface(lambda path: (ROOT / path).read_text() if (ROOT / path).exists() else "")
    broken = breaks(before, after)
    changed = _git("diff", "--name-only", "--diff-filter=MD", release["commit"], "--", MIGRATIONS)
    broken |= dict.fromkeys((changed or "").split(), "is a migration that databases have run")
    meant: Mapping[str, str] = release["broken"]
    lines = [f"{name}: {reason}" for name, reason in broken.items() if name not in meant]
    lines += [f"{name}: breaks nothing; delete it there" for name in meant.keys() - broken.keys()]
    for line in sorted(lines):
        print(line)
    if lines:
        print(f"{len(lines)} against {release['version']}: see {RELEASE.relative_to(ROOT)}")
    return 1 if lines else 0


def _git(*arguments: str) -> str | None:
    """Its output; None if it fails."""
    done = subprocess.run(
        ["git", "-C", ROOT, *arguments], capture_output=True, text=True, check=False
    )
    return done.stdout if done.returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
