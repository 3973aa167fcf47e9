"""What would break those who rely on the last release is found, and nothing else."""

import json
from typing import Any

import pytest

from tools.compatibility import ROOT, breaks, surface

JOB = {
    "type": "object",
    "required": ["job", "state"],
    "properties": {
        "job": {"type": "string"},
        "state": {"type": "string", "enum": ["running", "done"]},
        "ends": {"type": "array", "items": {"$ref": "#/components/schemas/End"}},
        "parent": {"$ref": "#/components/schemas/Job"},
    },
}
END = {"type": "object", "properties": {"code": {"type": "integer"}, "node": {"type": "string"}}}


def rest() -> dict[str, Any]:
    """An interface with one endpoint that lists jobs, and one that makes them."""
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Job"}}}
    limit = {"name": "limit", "required": False, "schema": {"type": "integer"}}
    wish = {
        "type": "object",
        "required": ["name"],
        "properties": {"name": {"anyOf": [{"type": "string"}, {"type": "null"}]}},
    }
    return json.loads(  # type: ignore[no-any-return]  # of its own, to be changed
        json.dumps(
            {
                "paths": {
                    "/jobs": {
                        "get": {"parameters": [limit], "responses": {"200": {"content": content}}},
                        "post": {
                            "requestBody": {"content": {"application/json": {"schema": wish}}},
                            "responses": {"201": {}, "409": {}},
                        },
                    }
                },
                "components": {"schemas": {"Job": JOB, "End": END}},
            }
        )
    )


def found_in(document: dict[str, Any], path: str = "docs/reference/openapi.json") -> dict[str, str]:
    """What the changed document breaks."""

    def read(document: dict[str, Any]) -> Any:
        return surface(lambda name: json.dumps(document) if name == path else "")

    return breaks(read(rest()), read(document))


def test_nothing_breaks_against_itself() -> None:
    assert found_in(rest()) == {}
    here = surface(lambda path: (ROOT / path).read_text())
    assert len(here) > 5000
    assert breaks(here, here) == {}


def changed(*path: str | int, to: Any) -> dict[str, Any]:
    """The interface with another value at this place; without it for None."""
    document = rest()
    place: Any = document
    for key in path[:-1]:
        place = place[key]
    if to is None:
        del place[path[-1]]
    else:
        place[path[-1]] = to
    return document


GET, POST = ("paths", "/jobs", "get"), ("paths", "/jobs", "post")
WISH = (*POST, "requestBody", "content", "application/json", "schema")
JOBS = ("components", "schemas", "Job", "properties")
ENDS = ("components", "schemas", "End", "properties")


@pytest.mark.parametrize(
    ("document", "name", "reason"),
    [
        (changed(*POST, to=None), "POST /jobs", "is gone"),
        (changed(*GET, "parameters", 0, to=None), "GET /jobs > limit", "is gone"),
        (changed(*JOBS, "ends", to=None), "GET /jobs > 200 > ends", "is gone"),
        (changed(*ENDS, "code", to=None), "GET /jobs > 200 > ends[] > code", "is gone"),
        (
            changed(*ENDS, "code", "type", to="number"),
            "GET /jobs > 200 > ends[] > code",
            "may now be number",
        ),
        (
            changed("components", "schemas", "Job", "required", to=["state"]),
            "GET /jobs > 200 > job",
            "may now be missing",
        ),
        (
            changed(*GET, "parameters", 0, "required", to=True),
            "GET /jobs > limit",
            "must now be given",
        ),
        (
            changed(*WISH, "properties", "name", to={"type": "string"}),
            "POST /jobs > name",
            "no longer takes null",
        ),
        (
            changed(*WISH, to={"properties": {"owner": {"type": "string"}}, "required": ["owner"]}),
            "POST /jobs > owner",
            "is new, and must be given",
        ),
    ],
)
def test_what_breaks_is_named(document: dict[str, Any], name: str, reason: str) -> None:
    assert found_in(document)[name] == reason


@pytest.mark.parametrize(
    "document",
    [
        changed("paths", "/nodes", to={"get": {"responses": {"200": {}}}}),
        changed(*JOBS, "name", to={"type": "string"}),
        changed(*JOBS, "state", "enum", to=["running", "done", "waiting"]),
        changed(*GET, "parameters", 0, "schema", to={"type": ["integer", "string"]}),
        changed(*WISH, "properties", "owner", to={"type": "string"}),
        changed(*POST, "responses", "409", to=None),
    ],
)
def test_additions_break_nothing(document: dict[str, Any]) -> None:
    assert found_in(document) == {}


def test_what_is_below_something_that_is_gone_is_not_named_again() -> None:
    assert found_in(changed(*JOBS, "ends", to=None)) == {"GET /jobs > 200 > ends": "is gone"}


CLI = "## everstep run\n\n| option | meaning |\n|---|---|\n| `-n, --nodes N` | How many. |\n"
CODES = "## Exit codes\n\n| code | meaning |\n|---|---|\n| 0 | Done. |\n"
SDK = '{"trainer_sdk.step": {"number": ["optional", "by name", "position 0"]}}'


@pytest.mark.parametrize(
    ("path", "before", "after", "broken"),
    [
        ("docs/reference/cli.md", CLI, CLI.replace("-n, ", ""), {"everstep run > -n"}),
        ("docs/reference/cli.md", CLI, CLI.replace("run", "go"), {"everstep run"}),
        ("docs/reference/cli.md", CLI.replace(" N`", " a/b`"), CLI.replace(" N`", " a/c`"),
         {"everstep run > -n", "everstep run > --nodes"}),
        ("docs/reference/cli.md", CODES, CODES.replace("| 0", "| 1"), {"exit code 0"}),
        ("docs/reference/sdk.json", SDK, "{}", {"trainer_sdk.step"}),
        ("docs/reference/sdk.json", SDK, SDK.replace("n 0", "n 1"), {"trainer_sdk.step > number"}),
        ("docs/reference/sdk.json", SDK, SDK.replace("optional", "required"),
         {"trainer_sdk.step > number"}),
        ("docs/reference/settings.md", "`EVERSTEP_BUS__URL`", "-", {"setting EVERSTEP_BUS__URL"}),
        ("docs/reference/metrics.md", "| `a_total` |", "| `b_total` |", {"metric a_total"}),
        ("trainer_sdk/layout.py", "STEP = 4  # it", "STEP = 5", {"page STEP"}),
    ],
)  # fmt: skip
def test_each_surface_is_compared(path: str, before: str, after: str, broken: set[str]) -> None:
    def read(text: str) -> Any:
        return surface(lambda name: text if name == path else "")

    assert set(breaks(read(before), read(after))) == broken
    assert breaks(read(before), read(before)) == {}
