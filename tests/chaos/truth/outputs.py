"""What people read of a case: console, `everstep why`, REST and the incident's page."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.chaos.truth.scene import Scene
from tests.e2e.cluster import Agent, Body
from tests.e2e.operators import command, operator

_RANKS_LINE = re.compile(r"\S+:\d+\| ")
_QUOTES = frozenset(
    {"traceback", "first_error", "error_text", "error_chain", "frames", "content", "similar",
     "job", "incident", "evidence_ids", "id", "at", "fingerprint"}
)  # fmt: skip
"""Values of REST that are no sentences of ours."""
_BLOCKS = frozenset({"p", "li", "h1", "h2", "h3", "dd", "td", "th", "summary", "small"})
_FIRST = re.compile("headline|reason|summary|story|says")


@dataclass(frozen=True, slots=True)
class Sentence:
    """A text, and where it was read."""

    place: str
    text: str
    names_cause: bool = False
    """Its first words say who caused something."""


def sentences(scene: Scene, incidents: list[Body]) -> list[Sentence]:
    """All that is said about a case."""
    return [
        *_console(scene),
        *_why(scene, incidents),
        *_rest(scene, incidents),
        *_pages(scene, incidents),
    ]


def _console(scene: Scene) -> Iterator[Sentence]:
    for console in (*scene.cluster.agents, *scene.others):
        for line in console.said.splitlines():
            is_ours = isinstance(console, Agent) or line.startswith("everstep: ")
            if is_ours and not _RANKS_LINE.match(line) and line.strip():
                text = line.removeprefix("everstep: ")
                over = re.match(r"round \d+ is over: ", text)
                text = text[over.end() :] if over else text
                yield Sentence(f"console {console.log.stem}", text, over is not None)


def _why(scene: Scene, incidents: list[Body]) -> Iterator[Sentence]:
    environ = operator(scene.cluster.plane, scene.folder)
    names = [scene.cluster.job, *(one["incident"] for one in incidents)]
    for name in names:
        done = command(environ, "why", name, "--api", scene.cluster.plane.api)
        lines = done.stdout.splitlines()
        for index, line in enumerate(lines):
            text, before = line.strip(), lines[index - 1] if index else ""
            if not text or text.startswith("│") or " other incident" in text:
                continue
            is_first = (index == 1 and line.startswith("  ")) or before.startswith("verdict: ")
            first = is_first or text.startswith(("verdict: ", "rank: ", "ranks: ", "node: "))
            yield Sentence("why", text, first and "first reported" not in text)


def _rest(scene: Scene, incidents: list[Body]) -> Iterator[Sentence]:
    api, job = scene.cluster.api, scene.cluster.job
    yield from _leaves("rest job", api.get(f"jobs/{job}"))
    yield from _leaves(
        "rest rounds", {"items": list(api.pages(f"jobs/{job}/rounds", {}, most=None))}
    )
    for incident in incidents:
        yield from _leaves("rest incident", incident)


def _leaves(place: str, value: object) -> Iterator[Sentence]:
    if isinstance(value, Mapping):
        for name, part in value.items():
            if name not in _QUOTES:
                yield from _leaves(f"{place}.{name}", part)
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(place, part)
    elif isinstance(value, str) and " " in value:
        name = place.rpartition(".")[2]
        aside = any(
            word in place
            for word in (
                "alternatives",
                "evidence",
                "revisions",
                "considered",
                "first_report",
                "missing",
                "stalls",
                "exits",
            )
        )
        yield Sentence(place, value, bool(_FIRST.search(name)) and not aside)


class _Text(HTMLParser):
    """The texts of a page's blocks; `dt` goes with its `dd`."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self._open: list[tuple[str, list[str]]] = []
        self._quiet = 0
        self._term = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"pre", "script", "style", "nav", "form"}:
            self._quiet += 1
        if tag in _BLOCKS or tag == "dt":
            self._open.append((tag, []))

    def handle_endtag(self, tag: str) -> None:
        if tag in {"pre", "script", "style", "nav", "form"}:
            self._quiet -= 1
        if self._open and self._open[-1][0] == tag:
            text = " ".join("".join(self._open.pop()[1]).split())
            if tag == "dt":
                self._term = text
            elif text:
                self.found.append((tag, f"{self._term}: {text}" if tag == "dd" else text))

    def handle_data(self, data: str) -> None:
        if self._open and not self._quiet:
            self._open[-1][1].append(data)


def _pages(scene: Scene, incidents: list[Body]) -> Iterator[Sentence]:
    plane = scene.cluster.plane
    cookies = {f"everstep_{urlsplit(plane.api).port}": plane.token}
    paths = [f"incidents/{one['incident']}" for one in incidents] + [f"jobs/{scene.cluster.job}"]
    for path in paths:
        answer = httpx.get(f"{plane.api}/{path}", cookies=cookies, timeout=60)
        assert answer.status_code == 200, f"{path}: {answer.status_code}"
        reader, is_similar = _Text(), False
        reader.feed(answer.text)
        for tag, text in reader.found:
            is_similar = text == "Similar incidents" if tag == "h2" else is_similar
            if not is_similar and " " in text:
                yield Sentence(f"page {path.partition('/')[0]} <{tag}>", text, tag == "h1")


def answers(incident: Body) -> Mapping[str, Any]:
    """The newest verdict; empty where there is none."""
    return incident["verdict"] or {}
