"""Renders the Helm chart into deploy/kubernetes/base, so that kustomize and plain kubectl have it.

It needs the Helm engine of the dependency group `kubernetes`. With --check it compares only.
"""

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
CHART = ROOT / "deploy/helm/everstep"
BASE = ROOT / "deploy/kubernetes/base"
NAME = NAMESPACE = "everstep"


def rendered(values: dict[str, Any] | None = None, name: str = NAME) -> dict[str, str]:
    """The chart's manifests by file, as `helm template everstep --namespace everstep` makes them.

    Raises the engine's error for values that the chart refuses.
    """
    helm: Any = importlib.import_module("helm_python")
    with helm.Chart.load(CHART) as chart:
        files: dict[str, str] = chart.render(values or {}, name=name, namespace=NAMESPACE)
    return {
        path.rpartition("/")[2]: text.strip() + "\n"
        for path, text in sorted(files.items())
        if text.strip()
    }


def main() -> int:
    """Exit code 1 and the names of files that differ, with --check."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    checks = parser.parse_args().check
    stale: list[str] = []
    for name, text in rendered().items():
        path = BASE / name
        content = f"# Rendered from deploy/helm/everstep by tools/render_chart.py.\n{text}"
        if path.is_file() and path.read_text() == content:
            continue
        stale.append(str(path.relative_to(ROOT)))
        if not checks:
            path.write_text(content)
    sys.stdout.write("".join(f"{'differs' if checks else 'written'}: {path}\n" for path in stale))
    return int(checks and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
