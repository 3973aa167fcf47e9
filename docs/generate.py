"""Writes the reference pages from the code; with --check, compares them and writes nothing."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from docs.generators import asyncapi, cli, messages, metrics, nvrx, rest, sdk, settings, xids

ROOT = Path(__file__).parent


def asyncapi_json() -> str:
    """The AsyncAPI document of the bus, as JSON."""
    return json.dumps(asyncapi.document(), indent=1, ensure_ascii=False) + "\n"


PAGES: Sequence[tuple[str, Callable[[], str]]] = (
    ("reference/messages.md", messages.page),
    ("reference/asyncapi.json", asyncapi_json),
    ("reference/cli.md", cli.page),
    ("reference/settings.md", settings.page),
    ("reference/rest.md", rest.page),
    ("reference/openapi.json", rest.openapi_json),
    ("reference/metrics.md", metrics.page),
    ("reference/sdk.json", sdk.sdk_json),
    ("reference/xids.md", xids.page),
    ("reference/nvrx.md", nvrx.page),
)
"""Each generated file, and the function that makes it. Add yours here."""


def stale(pages: Sequence[tuple[str, Callable[[], str]]], root: Path) -> list[Path]:
    """The files that are missing, or differ from what the code generates now."""
    return [
        root / name
        for name, make in pages
        if not (root / name).is_file() or (root / name).read_text(encoding="utf-8") != make()
    ]


def write(pages: Sequence[tuple[str, Callable[[], str]]], root: Path) -> None:
    """Write all these pages below `root`."""
    for name, make in pages:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(make(), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 when --check finds a stale file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="compare the pages, write nothing")
    if not parser.parse_args(arguments).check:
        write(PAGES, ROOT)
        return 0
    stale_paths = stale(PAGES, ROOT)
    for path in stale_paths:
        print(f"{path.relative_to(ROOT.parent)} is stale: run docs/generate.py", file=sys.stderr)
    return 1 if stale_paths else 0


if __name__ == "__main__":
    sys.exit(main())
