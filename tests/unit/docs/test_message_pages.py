"""The pages that are generated from the messages: an AsyncAPI document and a page, both fresh."""

import json
import re
import typing
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest

import everstep
from docs import generate
from docs.generators import message_description
from docs.generators import messages as messages_page
from everstep.messages import MESSAGE_TYPES, registry, tag_of

STRUCTS = [*MESSAGE_TYPES, *message_description.parts_of(MESSAGE_TYPES)]
Node = dict[str, typing.Any]


@pytest.fixture(scope="module")
def described() -> Node:
    """The AsyncAPI document, as a reader gets it."""
    read: Node = json.loads(generate.asyncapi_json())
    return read


def refs_in(node: object) -> Iterator[str]:
    children: Iterable[object] = ()
    if isinstance(node, dict):
        if isinstance(node.get("$ref"), str):
            yield node["$ref"]
        children = node.values()
    elif isinstance(node, list):
        children = node
    for child in children:
        yield from refs_in(child)


def resolved(root: Node, ref: str) -> Node:
    assert ref.startswith("#/"), ref
    node = root
    for key in ref[2:].split("/"):
        node = node[key]
    return node


def test_every_reference_in_the_asyncapi_document_leads_somewhere(described: Node) -> None:
    refs = list(refs_in(described))
    assert len(refs) > 500
    for ref in refs:
        assert resolved(described, ref)


def test_the_asyncapi_document_has_what_version_3_requires(described: Node) -> None:
    assert described["asyncapi"] == "3.0.0"
    assert described["info"]["title"]
    assert described["info"]["version"] == everstep.__version__
    assert set(described) <= {
        *("asyncapi", "id", "info", "servers", "defaultContentType"),
        *("channels", "operations", "components"),
    }
    for kind in described["components"].values():
        assert all(re.fullmatch(r"[a-zA-Z0-9._-]+", name) for name in kind)
    for channel in described["channels"].values():
        placeholders = set(re.findall(r"{(\w+)}", channel["address"] or ""))
        assert placeholders == set(channel.get("parameters", {}))
        assert channel["messages"]
    for operation in described["operations"].values():
        check_operation(described, operation)


def check_operation(described: Node, operation: Node) -> None:
    assert operation["action"] in ("send", "receive")
    for side in (operation, operation.get("reply", operation)):
        channel = side["channel"]["$ref"]
        assert channel.startswith("#/channels/")
        # A message of an operation is named by its channel, not by the components.
        assert all(m["$ref"].startswith(f"{channel}/messages/") for m in side["messages"])


def test_every_message_is_on_a_channel_with_its_schema(described: Node) -> None:
    on_channels = {
        name for channel in described["channels"].values() for name in channel["messages"]
    }
    assert on_channels == {message.__name__ for message in MESSAGE_TYPES}
    addresses = [channel["address"] for channel in described["channels"].values()]
    known = [address for address in addresses if address]
    assert len(set(known)) == len(known)
    for message in MESSAGE_TYPES:
        payload = described["components"]["messages"][message.__name__]["payload"]
        schema = resolved(described, payload["$ref"])
        assert schema["properties"]["type"]["enum"] == [tag_of(message)]
        assert all(p["description"] for p in schema["properties"].values())


def test_the_page_names_every_message_and_field() -> None:
    text = messages_page.page()
    for struct in STRUCTS:
        assert text.count(f"\n### {struct.__name__}\n") == 1
        for field in msgspec.structs.fields(struct):
            assert f"| `{field.name}` |" in text
    for target in re.findall(r"\]\(#([^)]+)\)", text):
        assert f"### {target}\n" in text.lower()
    assert all(f"\n## {area}\n" in text for area in registry.AREAS)


def test_generated_files_are_fresh_and_a_stale_one_is_named(tmp_path: Path) -> None:
    assert generate.stale(generate.PAGES, generate.ROOT) == [], "run docs/generate.py"
    pages = (("a/b.md", lambda: "new\n"), ("c.md", lambda: "same\n"))
    generate.write(pages, tmp_path)
    assert generate.stale(pages, tmp_path) == []
    (tmp_path / "a/b.md").write_text("old\n")
    assert generate.stale(pages, tmp_path) == [tmp_path / "a/b.md"]
    (tmp_path / "c.md").unlink()
    assert len(generate.stale(pages, tmp_path)) == 2


def test_the_check_exits_with_1_and_names_what_is_stale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(generate, "ROOT", tmp_path / "docs")
    assert generate.main(["--check"]) == 1
    assert "docs/reference/messages.md is stale" in capsys.readouterr().err
    assert not (tmp_path / "docs").exists(), "a check writes nothing"
    assert generate.main([]) == 0
    assert generate.main(["--check"]) == 0
