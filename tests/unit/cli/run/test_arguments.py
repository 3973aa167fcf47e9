"""The words after `everstep run`: read as torchrun reads them, and errors that help."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep_services.agent.settings import AgentSettings
from everstep_services.agent.stalls.limits import LimitRules
from everstep_services.cli.run import help_page
from everstep_services.cli.run.arguments import Given, UsageError, scan
from everstep_services.cli.run.compatibility import nodes_of
from everstep_services.cli.run.limit_rules import limits_of
from everstep_services.cli.run.options import NVRX, OPTIONS, OWN, TORCHRUN

TORCHRUN_WORDS = st.lists(
    st.sampled_from(
        [
            *["--nnodes", "--nnodes=2:4", "--nproc-per-node", "--nproc_per_node", "2", "auto"],
            *[
                "--standalone",
                "-m",
                "--module",
                "--no-python",
                "-r",
                "-r3",
                "-t=1",
                "-mr",
                "0:3,1:1",
            ],
            *["--rdzv-id=a", "--rdzv_conf", "timeout=3", "--max-restarts=3", "--max_restarts", "7"],
            *["--node-rank", "-1", "1", "--role=x", "--role", "train.py", "-", "--", "--lr", "a b"],
            *["--nproc-p", "--stand", "--max-r", "--rol", "--virtual", "--log-dir", "--tee", "-x"],
            *["--shutdown-timeout", "5", "--signals", "SIGUSR1", "--start-method", "fork", "-mx"],
            *["--local-ranks-filter", "0,1", "--monitor-interval=0.5", "--numa-binding", "node"],
        ]
    ),
    max_size=9,
)


def by_torchrun(words: Sequence[str]) -> Any:
    """What torchrun's own parser makes of the words; None when it refuses them."""
    from torch.distributed.run import get_args_parser

    try:
        return get_args_parser().parse_args(list(words))
    except SystemExit:
        return None


def ours(words: Sequence[str], environ: Mapping[str, str] | None = None) -> Given:
    return scan(words, environ or {})


@settings(max_examples=400, deadline=None)
@given(words=TORCHRUN_WORDS)
def test_what_torchrun_accepts_means_the_same_here(words: list[str]) -> None:
    theirs = by_torchrun(words)
    if theirs is None:
        return
    try:
        mine = ours(words)
    except UsageError:
        # torchrun takes `--node-rank -1` and runs into it later.
        assert "-1" in words
        return
    assert (mine.script, list(mine.arguments)) == (
        theirs.training_script,
        theirs.training_script_args,
    )
    for name, value in mine.values.items():
        assert str(getattr(theirs, name)) in {str(value), str(value).removesuffix(".0")}, name


def test_every_option_of_torchrun_is_there_with_its_variable() -> None:
    from torch.distributed.argparse_util import check_env, env
    from torch.distributed.run import get_args_parser

    here = {name: option for option in TORCHRUN for name in option.names}
    for action in get_args_parser()._actions:
        if not action.option_strings or action.dest == "help":
            continue
        for name in (each.replace("_", "-") for each in action.option_strings):
            assert here[name].to == action.dest
            assert (here[name].kind == "flag") == (action.nargs == 0)
            has_variable = isinstance(action, env | check_env)
            assert here[name].environment == (f"PET_{action.dest.upper()}" if has_variable else "")
    assert {option.to for option in TORCHRUN} == {
        action.dest for action in get_args_parser()._actions if action.option_strings
    } - {"help"}


def test_no_two_options_share_a_name() -> None:
    names = [name for option in OPTIONS for name in option.names]
    assert len(names) == len(set(names))


def test_the_command_line_wins_over_variables() -> None:
    environ = {"PET_NNODES": "4", "PET_STANDALONE": "1", "PET_MODULE": "0", "PET_ROLE": ""}
    given = ours(["--nnodes", "2", "x.py"], environ)
    assert given.values == {"nnodes": "2", "standalone": True, "module": False}
    assert given.origins["nnodes"] == "--nnodes"
    assert ours(["x.py"], environ).origins["nnodes"] == "PET_NNODES"


@pytest.mark.parametrize(
    ("words", "script", "arguments"),
    [
        (["t.py", "--nnodes", "2"], "t.py", ("--nnodes", "2")),
        (["--", "t.py", "--", "x"], "t.py", ("--", "x")),
        (["t.py", "--", "--x"], "t.py", ("--x",)),
        (["t.py", "--help"], "t.py", ("--help",)),
        (["-m", "pkg.train", "-m"], "pkg.train", ("-m",)),
        ([], None, ()),
    ],
)
def test_what_follows_the_script_belongs_to_it(
    words: list[str], script: str | None, arguments: tuple[str, ...]
) -> None:
    given = ours(words)
    assert (given.script, given.arguments) == (script, arguments)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--nprocs", "2"], "there is no option --nprocs; did you mean --nproc-per-node?"),
        (["--redirect_s", "2"], "did you mean --redirects?"),
        (["--zzz"], "there is no option --zzz; see everstep run --help"),
        (["-q"], "there is no option -q; see everstep run --help"),
        (["--master", "x"], "--master may mean --master-addr, --master-port: write more of it"),
        (["--nnodes"], "--nnodes needs a value: --nnodes N|MIN:MAX"),
        (["--nnodes", "--check"], "if that is the value, write --nnodes=--check"),
        (["--standalone=1"], "--standalone takes no value, but got '1'"),
        (["--max-restarts", "x"], "--max-restarts 'x': expected a whole number or none"),
        (["--max-restarts=-1"], "--max-restarts '-1': it must be at least 0"),
        (["--stop-grace", "5x"], "expected seconds, or a time such as 90s, 10m or 2h"),
        (["-o", "jsn"], "-o 'jsn': it is one of table, json, jsonl, name; did you mean json?"),
        (["--ft-cfg-path", "x.yaml"], "--ft-cfg-path x.yaml: No such file or directory"),
        (["--ft-no-restart-exit-code", "7"], "--ft-no-restart-exit-code is not for everstep"),
        (["--max-restarts", "9" * 40], "expected a whole number"),
    ],
)
def test_an_error_names_the_value_and_the_remedy(words: list[str], said: str) -> None:
    with pytest.raises(UsageError) as error:
        ours([*words, "train.py"] if len(words) > 1 else words)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.code == 2


def test_a_bad_variable_is_named() -> None:
    with pytest.raises(UsageError, match="PET_MAX_RESTARTS 'x': expected"):
        ours([], {"PET_MAX_RESTARTS": "x"})
    with pytest.raises(UsageError, match="PET_STANDALONE='yes': write 1"):
        ours([], {"PET_STANDALONE": "yes"})


def test_times_have_units() -> None:
    given = ours(["--stop-grace", "1.5m", "--preempt-grace=2h", "--join-timeout", "250ms"])
    assert given.values == {"stop_grace_s": 90, "preempt_grace_s": 7200, "join_within_s": 0.25}


@pytest.mark.parametrize("option", [one for one in TORCHRUN if one.note], ids=lambda o: o.long)
def test_what_has_no_effect_says_why_once(option: Any) -> None:
    value = {"whole": "1", "seconds": "1"}.get(option.kind, "fork")
    given = ours([f"{option.long}={value}", f"{option.long}={value}", "x.py"])
    assert given.notes == [f"{option.long} is not used: {option.note}"]
    for quiet in option.quiet:
        assert ours([f"{option.long}={quiet}", "x.py"]).notes == []


NVRX_TEXT = """
--ft-cfg-path --ft-ignore-missing-cfg --ft-workload-check-interval
--ft-initial-rank-heartbeat-timeout --ft-rank-heartbeat-timeout --ft-rank-section-timeouts
--ft-rank-out-of-section-timeout --ft-safety-factor --ft-rank-termination-signal --ft-log-level
--ft-node-health-check-interval --ft-node-health-check-endpoint --ft-restart-check-interval
--ft-restart-policy --ft-rdzv-impl --ft-enable-nic-monitor --ft-enable-nic-healthcheck
--ft-pci-topo-file --ft-link-down-path-template --ft-link-state-path-template
--ft-enable-dist-storage-healthcheck --ft-storage-health-check-path --ft-skip-section-response
--ft-numa-bind-strict --ft-gpu-memory-reclaim-timeout --ft-gpu-memory-tolerance-mb
--ft-gpu-memory-poll-interval --ft-check-remaining-processes --ft-install-exception-hook
--ft-max-no-progress-cycles --ft-min-progress-iterations --ft-checkpoint-iteration-file
--ft-segment --ft-no-restart-exit-code --ft-cycle-info-dir --ft-per-cycle-applog-prefix
--ft-nvrx-logfile --ft-enable-log-server --ft-log-server-port --ft-log-aggregator-count
--ft-log-leaf-max-queue-chunks --ft-log-server-log-prefix
--ft-log-server-graceful-shutdown-timeout --ft-attribution-endpoint
--ft-attribution-startup-timeout --ft-attribution-llm-api-key-file --ft-attribution-llm-base-url
--ft-attribution-llm-model --ft-attribution-analysis-backend --ft-attribution-stop-action
--ft-attribution-log-level --ft-attribution-export-url --term-timeout --workers-stop-timeout
--ft-segment-health-check-dir --ft-cycle-info-job-id --ft-num-warmup-iterations
"""
NVRX_FLAGS = NVRX_TEXT.split()


def test_every_option_of_ft_launcher_is_known() -> None:
    assert sorted(option.long for option in NVRX) == sorted(NVRX_FLAGS)
    for name in NVRX_FLAGS:
        word = name if name in {"--ft-ignore-missing-cfg", "--ft-check-remaining-processes"} else ""
        ours([word or f"{name}=null", "x.py"])


@pytest.mark.parametrize("name", NVRX_FLAGS)
def test_dashes_and_underscores_are_the_same(name: str) -> None:
    """NVRx's first spelling of most options has both: `--ft-rank_section_timeouts`."""
    mixed = name[:5] + name[5:].replace("-", "_")
    for spelling in (mixed, name.replace("-", "_").replace("__", "--", 1)):
        flag = name in {"--ft-ignore-missing-cfg", "--ft-check-remaining-processes"}
        words = [spelling, *([] if flag else ["null"]), "x.py"]
        assert ours(words) == ours([name, *words[1:]])
        assert help_page.is_wanted([*words[:-1], "--help"])


@pytest.mark.parametrize("as_nvrx", [["--as-nvrx"], ["--ft-segment=1"]])
def test_a_range_of_nodes_of_ft_launcher_names_the_spares(as_nvrx: list[str]) -> None:
    given = ours([*as_nvrx, "--nnodes=8:10", "x.py"])
    assert nodes_of(given) == (8, 10)
    assert "8 nodes and 2 hot spares are --nnodes 8 --spares 2" in given.notes[-1]


def test_each_option_of_nvrx_attribution_names_what_stands_in_its_place() -> None:
    names = [one for one in NVRX_FLAGS if one.startswith("--ft-attribution-")]
    names.remove("--ft-attribution-stop-action")
    notes = [ours([name, "x", "x.py"]).notes[-1] for name in names]
    assert len({note.partition(": ")[2] for note in notes}) == len(names) == 8
    model = notes[names.index("--ft-attribution-llm-model")]
    assert "set model in [attribution.explainer] of the services" in model


def test_options_of_ft_launcher_become_ours_with_a_note() -> None:
    given = ours(
        [
            *["--ft_segment", "4", "--ft-max-no-progress-cycles", "0", "--term-timeout", "1800"],
            *["--workers-stop-timeout", "15", "--ft-attribution-stop-action", "no-restart", "x.py"],
        ]
    )
    assert given.values == {
        "segment": 4,
        "no_progress_limit": None,
        "preempt_grace_s": 1800.0,
        "stop_grace_s": 15.0,
        "stop_on_repeat": True,
    }
    assert "--term-timeout is taken as --preempt-grace 1800" in given.notes
    assert "--ft-max-no-progress-cycles is taken as --no-progress-limit none" in given.notes


def rules(*words: str, **settings: Any) -> LimitRules:
    return limits_of(ours([*words, "x.py"]), AgentSettings(**settings))


def test_timeouts_of_ft_launcher_become_limits_that_say_where_they_come_from() -> None:
    """The options of ft_launcher mean what they mean there."""
    made = rules(
        *("--ft-initial-rank-heartbeat-timeout", "600", "--ft-rank-heartbeat-timeout", "30"),
        *("--ft-rank-section-timeouts", "setup:600,step:60,eval:none", "--limit", "step=90"),
        limits=("data=5m", "setup=1h"),
    )
    assert made.configured == {
        "first-step": 600, "heartbeat": 30, "setup": 600, "step": 90, "data": 300,
    }  # fmt: skip
    assert made.origins == {
        "first-step": "--ft-initial-rank-heartbeat-timeout",
        "heartbeat": "--ft-rank-heartbeat-timeout",
        "setup": "--ft-rank-section-timeouts",
        "step": "--limit",
        "data": "[agent] limits",
    }
    assert made.warmup_steps is None


def test_ft_launchers_warmup_is_the_first_step_and_four_more() -> None:
    sections = ("--ft-rank-section-timeouts", "warmup:300,step:60")
    made = rules(*sections)
    assert (made.configured, made.warmup_steps) == ({"first-step": 300, "step": 60}, 5)
    assert rules(*sections, "--warmup-steps", "2").warmup_steps == 2
    assert rules("--warmup-steps", "7", warmup_steps=3).warmup_steps == 7
    assert rules(warmup_steps=3).warmup_steps == 3


@pytest.mark.parametrize(
    ("sections", "is_late"), [("step:60", True), ("step:60,warmup:90", False), ("null", False)]
)
def test_ft_launcher_looks_outside_of_sections_after_the_first_step(
    sections: str, is_late: bool
) -> None:
    options = ("--ft-rank-section-timeouts", sections, "--ft-rank-out-of-section-timeout", "90")
    assert rules(*options).is_outside_late is is_late
    assert not rules(*options, "--limit", "outside=90").is_outside_late


def test_a_name_that_no_section_can_have_is_refused() -> None:
    with pytest.raises(UsageError, match="the names of sections are known by 64 bytes at most"):
        rules("--limit", f"{'ä' * 33}=30")


def test_a_number_of_warm_up_steps_must_make_sense() -> None:
    with pytest.raises(UsageError, match="--warmup-steps '0': it must be at least 1"):
        ours(["--warmup-steps", "0", "x.py"])
    with pytest.raises(ValueError, match="warmup_steps must be at least 1, got 0"):
        AgentSettings(warmup_steps=0)


@pytest.mark.parametrize("nothing", ["null", "none", ""])
def test_null_means_not_given_as_with_ft_launcher(nothing: str) -> None:
    given = ours([f"--ft-segment={nothing}", f"--ft-rank-heartbeat-timeout={nothing}", "x.py"])
    assert "segment" not in given.values
    assert given.notes == []


def test_our_option_wins_over_an_alias_in_any_order() -> None:
    for words in (["--stop-grace=3", "--workers-stop-timeout=15"],
                  ["--workers-stop-timeout=15", "--stop-grace=3"]):  # fmt: skip
        given = ours(words)
        assert given.values["stop_grace_s"] == 3
        assert given.notes == ["--workers-stop-timeout is not used: --stop-grace was given, too"]


def test_every_shown_option_has_help_that_is_a_sentence() -> None:
    for option in (*TORCHRUN, *OWN, *NVRX):
        assert option.help.endswith((".", ")")), option.long
        assert (option.metavar == "") == (option.kind == "flag") or option.long in {
            "--ft-ignore-missing-cfg",
            "--ft-check-remaining-processes",
        }


def test_the_environment_of_this_process_is_not_read() -> None:
    os.environ["PET_NNODES"] = "77"
    try:
        assert ours(["x.py"]).values == {}
    finally:
        del os.environ["PET_NNODES"]
