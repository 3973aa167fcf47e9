"""The quickstart as it is written: its script and its commands, in their order."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.ids import new_id
from tests.e2e.processes import ROOT, Process, environment, kill_all, tagged

pytestmark = [
    pytest.mark.variant,  # five agents, and a control plane
    pytest.mark.timeout(600),
]
TEXT = (ROOT / "docs/quickstart.md").read_text()
WITHIN_S = 240
NOT_RUN = {"make demo", "source .venv/bin/activate", ".venv/bin/everstep run train.py"}
"""They install: `make` has done it before a test runs."""
SAYS = {
    "everstep run --job first --nproc-per-node 2 train.py": (
        "round 1 is over: rank 1 was ended by SIGKILL",
        "round 2: 1 slot, restart 1",
        ":0| step 100 loss",
    ),
    "everstep jobs": ("first",),
    "everstep why": (
        "this is the record on disk",
        "rank 1 was ended by SIGKILL; round 2 has made its first step",
        "verdict: cause unknown: killed by SIGKILL",
        "decided: restart, by rule restart.budget_left",
        "where the time went",
    ),
    "everstep logs first --round 2 --rank 0": ("step 100 loss",),
    "everstep up --detach": ("is ready on this machine", "page ", "stop it: everstep down"),
    "everstep job show second": ("second",),
    "everstep down": (),
}
"""Each command that must succeed, and what the page promises of it."""


def script() -> str:
    found = re.search(r"(?s)cat > train\.py <<'EOF'\n(.*?)\nEOF\n", TEXT)
    assert found is not None
    return found[1] + "\n"


def commands() -> list[str]:
    """The commands of the page, in order."""
    text = "\n".join(re.findall(r"(?s)```console\n(.*?)```", TEXT))
    shown = [line[2:].partition("#")[0].strip() for line in text.splitlines() if line[:2] == "$ "]
    inline = re.findall(r"`(everstep down)`\.", TEXT)
    return [command for command in [*shown, *inline] if command not in NOT_RUN]


@pytest.fixture
def environ(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A home with nothing in it, and the programs of this environment."""
    tag = new_id()
    names = environment(tmp_path, tag, EVERSTEP_API__PORT="0")
    path = f"{Path(sys.executable).parent}{os.pathsep}{names['PATH']}"
    yield {**names, "PATH": path}
    kill_all(tagged(tag))


def run(command: str, environ: dict[str, str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", command], env=environ, cwd=folder, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=WITHIN_S, check=False,
    )  # fmt: skip


def test_each_command_does_what_the_page_says(tmp_path: Path, environ: dict[str, str]) -> None:
    (tmp_path / "train.py").write_text(script())
    agents: list[Process] = []
    for command in commands():
        if command.endswith("&"):
            words = ("bash", "-c", f"exec {command.rstrip('& ')}")
            log = tmp_path / f"agent-{len(agents)}.log"
            agents.append(Process(words, environ, log, tmp_path))
            continue
        if command == "everstep job show second":
            for agent in agents:
                assert agent.wait(WITHIN_S) == 0, agent.said
        done = run(command, environ, tmp_path)
        assert done.returncode == 0, f"{command}: {done.stdout}"
        missing = [text for text in SAYS.get(command, ()) if text not in done.stdout]
        assert missing == [], f"{command}: {done.stdout}"
    assert len(agents) == 3


def test_each_command_of_the_page_is_known_to_this_test() -> None:
    """A new example comes with what it must do."""
    known = {*SAYS, "rm -f latest.pt"}
    assert [one for one in commands() if one not in known and not one.endswith("&")] == []
