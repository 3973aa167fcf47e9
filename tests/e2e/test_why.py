"""What a person sees of a verdict, and what it does, in a training whose bug comes again."""

import os

from everstep_services.cli.errors import Exit
from tests.e2e.cluster import Cluster
from tests.e2e.operators import ask, command, operator

BUG = """import os, signal, sys

if os.environ["RANK"] == "0":
    signal.pause()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    open(sys.argv[1]).read()  # until the test lets it go on
raise ValueError("expected 8 classes, found 9")
"""


def test_a_bug_that_comes_again_is_explained_and_stops_its_job(cluster: Cluster) -> None:
    """One confirming retry, then it stops; one command says why (A4.5, A11.1)."""
    script = cluster.folder / "bug.py"
    script.write_text(BUG)
    gate = cluster.folder / "gate"
    os.mkfifo(gate)
    agent = cluster.run("--cold", "--nproc-per-node", "2", str(script), str(gate))
    cluster.until_fact("round_started")
    switch = "attribution.user_errors=enforce"
    ask(cluster, "control", "set", switch, "--job", cluster.job, "--reason", "bugs cost nodes")
    gate.write_text("go on")
    assert agent.wait() == 93
    decided = cluster.until_fact("action_decided", lambda body: body["rule"] == "stop.user_error")
    taken = cluster.until_fact("action_taken", lambda body: body["decision"] == decided["id"])
    assert (decided["source"], taken["outcome"]) == ("attribution", "done")
    assert len(cluster.facts("round_formed")) <= 3

    environ = operator(cluster.plane, cluster.folder)
    incident = cluster.incidents()[0]["incident"]
    for named in (cluster.job, incident[:12]):
        said = command(environ, "why", named, "--api", cluster.plane.api)
        assert said.returncode == Exit.OK, said.stderr
        assert "\nverdict: user_code" in said.stdout
        assert "ValueError: expected 8 classes, found 9" in said.stdout
    report = cluster.folder / "report.html"
    words = ("incident", "report", incident, "-o", "html", "-f", str(report))
    assert command(environ, *words, "--api", cluster.plane.api).returncode == Exit.OK
    assert "verdict: user_code" in report.read_text()
