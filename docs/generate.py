"""Writes the reference pages that are made from the code; with --check, only compares."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from everstep.messages import asyncapi, page
from everstep_services.agent.probes.kernel import xid_page
from everstep_services.cli import metrics_page, settings_page
from everstep_services.cli import page as cli
from everstep_services.history.api import page as rest

ROOT = Path(__file__).parent


def asyncapi_json() -> str:
    """The bus, for programs."""
    return json.dumps(asyncapi.document(), indent=1, ensure_ascii=False) + "\n"


PAGES: Sequence[tuple[str, Callable[[], str]]] = (
    ("reference/messages.md", page.page),
    ("reference/asyncapi.json", asyncapi_json),
    ("reference/cli.md", cli.page),
    ("reference/settings.md", settings_page.page),
    ("reference/rest.md", rest.page),
    ("reference/openapi.json", rest.openapi_json),
    ("reference/metrics.md", metrics_page.page),
    ("reference/xids.md", xid_page.page),
)
"""Each generated file, and what makes it. Add yours here."""


def stale(pages: Sequence[tuple[str, Callable[[], str]]], root: Path) -> list[Path]:
    """The files that are missing, or not what the code says now."""
    return [
        root / name
        for name, made in pages
        if not (root / name).is_file() or (root / name).read_text(encoding="utf-8") != made()
    ]


def write(pages: Sequence[tuple[str, Callable[[], str]]], root: Path) -> None:
    """Write them all."""
    for name, made in pages:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(made(), encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 1 when --check finds a stale file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    if not parser.parse_args(arguments).check:
        write(PAGES, ROOT)
        return 0
    found = stale(PAGES, ROOT)
    for path in found:
        print(f"{path.relative_to(ROOT.parent)} is stale: run docs/generate.py", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
