"""The plan of `everstep run`: every default filled in, every refusal one line."""

import sys
from pathlib import Path

import pytest
from msgspec import structs

from everstep_services.agent.probes.registry import beside_training
from everstep_services.agent.ranks.cpu_affinity import CpuBinding
from everstep_services.agent.run_plan import ConsoleChoice, Std
from everstep_services.cli.machine.state import RunningServices, StateDir
from everstep_services.cli.run import plan as plan_module
from everstep_services.cli.run.start import objections, record
from tests.unit.agent.run_plans import BUS, plan, refused

RACKS = ("--nnodes", "4", "--group-size", "2", "--job", "j", *BUS)


def test_one_script_needs_nothing_else(home: Path) -> None:
    made = plan(home, "train.py", "--lr", "3")
    assert made.standalone
    assert made.bus is None
    assert made.job.startswith("train-")
    assert made.command.kind == "script"
    assert made.command.argv(0) == ("train.py", "--lr", "3")
    assert made.command.python == sys.executable
    assert (made.spec.nodes_min, made.spec.nodes_max, made.ranks_per_node) == (1, 1, 1)
    assert made.spec.max_restarts == 10
    assert made.spec.no_progress_limit == 3
    assert made.spec.enforce == ()
    assert (made.warm, made.preload) == (True, "auto")
    assert made.address == "127.0.0.1"
    assert made.log_dir == home / ".local" / "state" / "everstep" / "logs"
    assert made.console == ConsoleChoice()
    assert made.notes == ()
    assert list(objections(made)) == []


@pytest.mark.parametrize("flag", ["--bus-credentials-file", "--bus-password-file"])
def test_a_login_that_cannot_be_read_is_refused_before_anything_starts(
    home: Path, flag: str
) -> None:
    user = ("--bus-user", "me") if "password" in flag else ()
    made = plan(home, *BUS, *user, flag, str(home / "nothing"), "train.py")
    [wrong] = objections(made)
    assert str(home / "nothing") in wrong
    assert "cannot be read" in wrong


@pytest.mark.parametrize("nodes", ["1", "2"])
def test_an_address_of_no_interface_is_refused_with_any_number_of_nodes(
    home: Path, nodes: str
) -> None:
    made = plan(home, *BUS, "--job", "j", "--nnodes", nodes, "--address", "203.0.113.7", "train.py")
    [wrong] = objections(made)
    assert wrong.startswith("no interface of this host has the address 203.0.113.7, so ranks ")


def test_two_runs_are_two_jobs(home: Path) -> None:
    assert plan(home, "train.py").job != plan(home, "train.py").job


def test_layers_of_the_settings(home: Path) -> None:
    (home / "everstep.toml").write_text("[agent]\nmax_restarts = 1\nstop_grace_s = 7.0\n")
    assert plan(home, "train.py").spec.max_restarts == 1
    variable = {"EVERSTEP_AGENT__MAX_RESTARTS": "2"}
    assert plan(home, "train.py", **variable).spec.max_restarts == 2
    variable["PET_MAX_RESTARTS"] = "3"
    assert plan(home, "train.py", **variable).spec.max_restarts == 3
    made = plan(home, "--max-restarts", "4", "train.py", **variable)
    assert made.spec.max_restarts == 4
    assert made.agent.stop_grace_s == made.spec.stop_grace_s == 7
    assert plan(home, "--max-restarts=none", "train.py", **variable).spec.max_restarts is None
    assert plan(home, "--max-restarts=0", "train.py", **variable).spec.max_restarts == 0


def test_a_setting_past_its_bounds_is_one_line(home: Path) -> None:
    assert "stop_grace_s must be below 1e+07" in refused(home, "--stop-grace=9999999h", "train.py")


def test_a_running_everstep_up_is_found(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = RunningServices(
        pid=1, version="0", api="http://127.0.0.1:7070", observe="", token_file="/t",
        bus="nats://127.0.0.1:4222", bus_version="2", bus_pid=2, services=[],
    )  # fmt: skip
    monkeypatch.setattr(StateDir, "running", lambda self: running)
    made = plan(home, "--nnodes", "2", "--job", "j", "train.py")
    assert (made.bus, made.standalone) == (None, False)
    assert str(record(made)["bus"]).startswith("that of everstep up on ")
    assert plan(home, "--standalone", "train.py").standalone
    monkeypatch.setattr(StateDir, "running", lambda self: structs.replace(running, command="run"))
    assert plan(home, "train.py").standalone


def test_standalone_declines_a_bus_that_is_known(home: Path) -> None:
    made = plan(home, "--standalone", *BUS, "train.py")
    assert (made.bus, made.standalone) == (None, True)


def test_an_address_that_cannot_be_resolved_is_refused_with_one_line(home: Path) -> None:
    text = refused(home, "--address", "no such.host", "train.py")
    assert text.startswith("--address 'no such.host' cannot be resolved")
    assert "\n" not in text


def test_every_option_arrives(home: Path) -> None:
    made = plan(
        home,
        *["--job", "llama", "--name", "Llama 8B", "--nnodes", "4:8", "--spares", "2"],
        *["--unit", "2", "--segment", "4", "--nproc-per-node", "8", "--max-restarts-per-hour", "6"],
        *["--no-progress-limit", "5", "--stop-on-repeat", "--stop-grace", "3"],
        *["--preempt-grace", "10m", "--node-id", "n7", "--infra-rank", "7", "--domain", "rack-3"],
        *["--topology", "block-1/rack-3", "--cold", "--preload", "numpy,einops"],
        *["--allocation", "a1", "--label", "team=vision", "--label", "x=", "--address", "10.0.0.7"],
        *[
            "--network-test",
            "failures",
            "--join-timeout",
            "60",
            "--console",
            "0,2-3",
            "--no-prefix",
            "--role",
            "actor",
        ],
        *["--bus-url", "nats://bus:4222", "--bus-credentials-file", "/x.creds"],
        *["--log-dir", "logs", "--signals-to-handle", "SIGTERM,sigusr1", "-m", "my.train", "-v"],
    )
    spec = made.spec
    assert (made.job, spec.name, spec.nodes_min, spec.nodes_max, spec.spares) == (
        "llama", "Llama 8B", 4, 8, 2,
    )  # fmt: skip
    assert (spec.slots_per_unit, spec.slots_per_segment, spec.ranks_per_node) == (2, 4, 8)
    assert (spec.max_restarts_per_hour, spec.no_progress_limit) == (6, 5)
    assert (spec.enforce, spec.network_test) == (("stop", "no_progress"), "failures")
    assert (spec.join_within_s, spec.stop_grace_s, made.agent.preempt_grace_s) == (60, 3, 600)
    assert (made.node, made.infra_rank, made.domain, made.allocation) == ("n7", 7, "rack-3", "a1")
    assert made.topology == ("block-1", "rack-3")
    assert (made.warm, made.preload) == (False, ("numpy", "einops"))
    assert spec.labels == {"team": "vision", "x": ""}
    assert made.address == "10.0.0.7"
    assert made.console.ranks == frozenset({0, 2, 3})
    assert made.console.prefix is None
    assert made.role == "actor"
    assert made.bus is not None
    assert (made.bus.url, made.bus.credentials_file) == ("nats://bus:4222", Path("/x.creds"))
    assert made.log_dir == home / "logs"
    assert made.signals == ("SIGTERM", "SIGUSR1")
    assert (made.command.kind, made.command.argv(1)) == ("module", ("my.train", "-v"))
    assert not made.standalone
    assert record(made)["nodes"] == "4 to 8, by 2, in segments of 4, and 2 spare"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "what shall run?"),
        (["--nnodes", "3:2", "train.py"], "the least number comes first, as in 2:3"),
        (["--nnodes", "0", "train.py"], "a job has at least one node"),
        (["--nnodes", "two", "train.py"], "expected a number of nodes, or a range such as 4:8"),
        (["--nproc-per-node", "0", "train.py"], "a node runs at least one rank"),
        (["--nproc-per-node", "8x", "train.py"], "expected a whole number, or one of auto, gpu"),
        (["--nnodes", "2", "train.py"], "give the same --job ID on each"),
        (["--nnodes", "2", "--job", "j", "train.py"], "2 nodes need a bus to meet on"),
        (["--spares", "1", "--job", "j", "train.py"], "2 nodes need a bus to meet on"),
        (["--standalone", "--nnodes", "2", "--job", "j", "x.py"], "--standalone is for one node"),
        (["--job", "a.b", "train.py"], "--job: 'a.b' cannot name a job"),
        (["--node-id", "a b", "train.py"], "--node-id: 'a b' cannot name a node"),
        (["--label", "x", "train.py"], "--label 'x': write KEY=VALUE"),
        (["--unit", "3", "--nnodes", "4", "--job", "j", *BUS, "x"], "is not a multiple of it"),
        ([*RACKS, "--spares", "1", "--domain", "r", "x"], "--spares 1: with --group-size 2"),
        ([*RACKS, "--segment", "2", "--domain", "r", "x"], "--segment 2 and --group-size 2: give"),
        ([*RACKS, "x"], "this node has no replacement group"),
        (["-m", "--no-python", "x"], "-m needs Python, --no-python declines it"),
        (["--warm", "--no-python", "x"], "--warm needs Python"),
        (["--console", "some", "train.py"], "expected all, none, or ranks with commas"),
        (["--local-ranks-filter", ",", "train.py"], "expected ranks with commas"),
        (["-r", "4", "train.py"], "write 0 none, 1 stdout, 2 stderr, 3 both"),
        (["-t", "0:1,", "train.py"], "write 0 none, 1 stdout, 2 stderr, 3 both"),
        (["--signals-to-handle", "SIGFOO", "x.py"], "SIGFOO is not a signal"),
        (["--rdzv-conf", "timeout", "x.py"], "'timeout': write KEY=VALUE"),
        (["--rdzv-conf", "timeout=x", "x.py"], "timeout=x is not a number of seconds"),
        (["--ft-segment", "0", "x.py"], "a segment has at least one slot"),
    ],
)
def test_a_refusal_says_what_to_do(home: Path, words: list[str], said: str) -> None:
    assert said in refused(home, *words)


def test_torchruns_run_id_names_the_job(home: Path) -> None:
    made = plan(home, "--rdzv-id", "my job.7", "train.py")
    assert (made.job, made.run_id) == ("my-job-7", "my job.7")
    assert made.notes == (
        "the job is called my-job-7, by --rdzv-id ('my job.7' holds what no id may)",
    )
    assert plan(home, "--rdzv-id", "x", "--job", "y", "train.py").job == "y"
    assert plan(home, "train.py", PET_RDZV_ID="none").job.startswith("train-")


def test_the_replacement_group_of_a_node_is_its_domain_or_topology(home: Path) -> None:
    made = plan(home, *RACKS, "--topology", "spine/leaf-3", "train.py")
    assert (made.spec.slots_per_group, made.group) == (2, "spine/leaf-3")
    assert record(made)["group"] == "spine/leaf-3"
    assert record(made)["nodes"] == "4, replaced in groups of 2"
    assert plan(home, *RACKS, "--domain", "rack-3", "train.py").group == "rack-3"
    by_nvrx = ["--nnodes=4", "--job=j", *BUS, "--rdzv-conf=replacement_group_size=2"]
    assert plan(home, *by_nvrx, "--group", "g", "train.py").group == "g"
    assert plan(home, *by_nvrx[:-1], "--group", "g", "train.py").group == ""


def test_a_command_line_of_torchrun_on_two_nodes(home: Path) -> None:
    made = plan(
        home,
        *["--nnodes=2", "--nproc_per_node=2", "--rdzv_id=77", "--rdzv_backend=c10d"],
        *["--rdzv_endpoint=host:29400", "--max_restarts=3", "--node_rank=1"],
        *["--rdzv_conf=join_timeout=120,timeout=900,last_call_timeout=5,segment=2", "train.py"],
        EVERSTEP_BUS__URL="nats://127.0.0.1:4222",
    )
    assert (made.job, made.infra_rank, made.spec.join_within_s) == ("77", 1, 120)
    assert made.spec.slots_per_segment == 2
    assert made.notes == (
        "--rdzv-endpoint is not used: agents meet on the bus, and no node is special",
        "last_call_timeout in --rdzv-conf: not used, agents meet on the bus",
        "the job is called 77, by --rdzv-id",
        "join_timeout of --rdzv-conf is taken as --join-timeout 120",
        "OMP_NUM_THREADS is 1 for each rank, as with torchrun; set it to have more",
    )


def test_signals_that_cannot_be_chosen_are_noted(home: Path) -> None:
    made = plan(home, "--signals-to-handle", "SIGTERM,SIGUSR1,SIGALRM", "train.py")
    assert made.notes == (
        "SIGALRM in --signals-to-handle: not handled; SIGTERM, SIGINT, SIGHUP, SIGQUIT, SIGUSR1 "
        "and SIGUSR2 always are",
    )


def test_one_timeout_of_torchrun_sets_both_graces(home: Path) -> None:
    made = plan(home, "--shutdown-timeout", "9", "train.py")
    assert (made.agent.stop_grace_s, made.agent.preempt_grace_s) == (9, 9)
    made = plan(home, "--shutdown-timeout", "9", "--stop-grace", "2", "train.py")
    assert (made.agent.stop_grace_s, made.agent.preempt_grace_s) == (2, 9)


# -- the console ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ([], "33 33"),
        (["-r", "3"], "00 00"),
        (["-r", "1"], "22 22"),
        (["-r", "1:3"], "33 00"),
        (["-r", "3", "-t", "0:1"], "11 00"),
        (["-t", "3"], "33 33"),
        (["--local-ranks-filter", "1"], "00 33"),
        (["--console", "4"], "30 00"),
        (["--console", "none"], "00 00"),
    ],
)
def test_what_is_shown_of_ranks_4_to_7_on_two_nodes(
    home: Path, words: list[str], shown: str
) -> None:
    console = plan(home, *words, "train.py").console
    # Nodes with ranks 4, 5 and 6, 7: local ranks 0 and 1 of each.
    found = {rank: int(console.shows(rank, rank % 2)) for rank in (4, 6, 5, 7)}
    assert f"{found[4]}{found[6]} {found[5]}{found[7]}" == shown


def test_a_prefix_by_torchruns_variable(home: Path) -> None:
    template = {"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": "[${rank}] "}
    assert plan(home, "train.py", **template).console.prefix == "[${rank}] "
    assert plan(home, "--no-prefix", "train.py", **template).console.prefix is None
    assert Std.ALL == Std.OUT | Std.ERR


@pytest.mark.parametrize(
    "endpoint", ["unix:///run/nvhcd.sock", "unix:/run/nvhcd.sock", "/run/nvhcd.sock"]
)
def test_the_daemon_of_nvrx_is_the_check_daemon(home: Path, endpoint: str) -> None:
    """Its result keeps an unfit node from joining, as with NVRx (users.md §12)."""
    made = plan(home, "--ft-node-health-check-endpoint", endpoint, "train.py")
    assert made.checks.daemon == Path("/run/nvhcd.sock")
    assert "daemon" in beside_training(made.checks)
    assert any("is taken as the setting daemon of [checks]" in note for note in made.notes)


def test_without_an_endpoint_the_daemon_is_that_of_the_settings(home: Path) -> None:
    (home / "everstep.toml").write_text('[checks]\ndaemon = "/run/ours.sock"\n')
    assert plan(home, "train.py").checks.daemon == Path("/run/ours.sock")
    none = plan(home, "--ft-node-health-check-endpoint", "none", "train.py")
    assert none.checks.daemon == Path("/run/ours.sock")


@pytest.mark.parametrize("endpoint", ["localhost:50051", "run/nvhcd.sock", "unix:relative.sock"])
def test_an_endpoint_that_is_no_unix_socket_is_one_line(home: Path, endpoint: str) -> None:
    said = refused(home, "--ft-node-health-check-endpoint", endpoint, "train.py")
    assert f"{endpoint!r}: give the absolute path of a unix socket" in said


def test_a_strict_binding_that_cannot_hold_is_refused(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "bindings_here", lambda *_: ((), "--numa-binding: no node"))
    words = ("--numa-binding", "node", "train.py")
    assert (
        plan(home, "--ft-numa-bind-strict", "false", *words).notes[-1] == "--numa-binding: no node"
    )
    said = refused(home, "--ft-numa-bind-strict", "true", *words)
    assert "--numa-binding: no node, and --ft-numa-bind-strict demands it: give false" in said
    assert "give true or false" in refused(home, "--ft-numa-bind-strict", "perhaps", *words)


def test_a_strict_binding_is_for_memory_too(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    binding = CpuBinding(frozenset({0}), (0,))
    monkeypatch.setattr(plan_module, "bindings_here", lambda *_: ((binding,), ""))
    words = ("--numa-binding", "node", "train.py")
    (strict,) = plan(home, "--ft-numa-bind-strict", "true", *words).cpu_bindings
    (usual,) = plan(home, *words).cpu_bindings
    assert (strict.is_strict, usual.is_strict) == (True, False)
    unbound = plan(home, "--ft-numa-bind-strict", "true", "train.py")
    assert unbound.cpu_bindings == ()
    assert "--ft-numa-bind-strict is not used without --numa-binding" in unbound.notes[-1]
