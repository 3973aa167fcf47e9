"""What the ends of ranks and nodes say, and what history adds."""

import asyncio
from datetime import timedelta

import pytest
from msgspec.structs import replace

from everstep.messages import Case, NodeSign, OutsideAct, PastIncident, RankEnd, Stall
from everstep_services.attribution.analyzers import ends, health, history, rank_ends, runner, stalls
from everstep_services.attribution.domain.combiner import CaseJudgement, combine
from everstep_services.attribution.incident import Analyzer
from tests.unit.attribution.cases import NOON, case, claim, end, lost_peer, nothing, raised

PURE: dict[str, Analyzer] = {
    "ends": ends.analyze,
    "stalls": stalls.analyze,
    "health": health.analyze,
    "history": history.analyze,
}


async def judged(of: Case) -> CaseJudgement:
    heard = await runner.AnalyzerRunner(PURE).run(of, nothing, 30.0)
    return await asyncio.to_thread(combine, of, heard.claims, heard.missing)


async def test_a_rank_that_raised_is_the_culprit_and_its_peers_are_not() -> None:
    """A user's error, with three ranks that only lost a peer, whatever came first (A11.1)."""
    root = raised(3, "ValueError", "batch 17 has no labels", after_s=0.2)
    found = await judged(case(ends=(lost_peer(0), lost_peer(1), lost_peer(2), root)))
    assert (found.cause, found.ranks, found.nodes) == ("user_code", (3,), ())
    assert "ValueError: batch 17 has no labels at train.py:8 in step" in found.reason
    assert found.confidence > 0.8


async def test_ranks_that_their_launcher_ended_after_a_failure_are_no_cause() -> None:
    """torchrun sends SIGTERM to all others when one rank has exited; nobody preempted them."""
    failed = end(1, exit_code=3)
    sent = end(0, how="signal", signal="SIGTERM", exit_code=None, after_s=0.1)
    elsewhere = end(2, how="signal", signal="SIGTERM", exit_code=None, after_s=5.0)
    found = await judged(case(ends=(sent, failed, elsewhere)))
    assert (found.cause, found.kind, found.ranks) == ("user_code", "exit_code", (1,))
    assert "2 ranks (0, 2) failed only because of that" in found.reason
    before = await judged(case(ends=(replace(sent, at=NOON - timedelta(seconds=1)), failed)))
    assert before.cause != "user_code"


@pytest.mark.parametrize("signal", ["SIGTERM", "SIGKILL"])
@pytest.mark.parametrize("is_fatal", [True, False])
async def test_a_rank_that_its_own_monitor_ended_has_stood_still(
    signal: str, *, is_fatal: bool
) -> None:
    """No scheduler has terminated it."""
    stall = Stall(
        rank=1, node="n0", fact="stalled", round=1, phase="heartbeat", waited_s=40.0, limit_s=40.0,
        signal="monitor",
    )  # fmt: skip
    own = end(1, how="signal", signal=signal, exit_code=None)
    of = case(ends=(own, lost_peer(0), lost_peer(2)))
    found = await judged(replace(of, **{"stalls" if is_fatal else "warned_stalls": (stall,)}))
    assert (found.cause, found.ranks) == ("unknown", (1,))
    assert "rank 1 (n0) stood still for 40 s, so the monitor of its in-process" in found.reason
    assert found.evidence[0][0].strength == 0.85
    found = await judged(of)
    assert "stood still" not in found.reason
    again = replace(of, ends=(), stalls=(stall,), trigger="restarted_in_process", rank=1)
    found = await judged(replace(again, rank=0, reason="rank 0 made no progress for 12 s"))
    assert found.ranks == (1,), "all ranks reach the soft limit, and rank 0 was only the first"
    assert "the monitor of its in-process restart woke it by SIGTERM" in found.reason


@pytest.mark.parametrize(
    ("reason", "error_name", "cause", "kind"),
    [
        ("rank 1 did RuntimeError: on purpose", "RuntimeError", "user_code", "python_exception"),
        ("rank 1 raised no progress for 60 s", "", "unknown", "stood_still"),
        (
            "rank 1 raised OutOfMemoryError: CUDA out of memory. Tried",
            "OutOfMemoryError",
            "user_code",
            "gpu_oom",
        ),
    ],
)
async def test_what_a_rank_did_before_all_restarted_in_their_processes(
    reason: str, error_name: str, cause: str, kind: str
) -> None:
    of = case(trigger="restarted_in_process", rank=1, reason=reason, error_name=error_name)
    found = await judged(of)
    assert (found.cause, found.kind, found.ranks) == (cause, kind, (1,))
    assert found.reason.startswith(f"{reason}; all ranks restarted in their processes")


async def test_a_rank_that_exits_without_a_word_is_named_as_silent() -> None:
    """Its exit code, that it wrote nothing, and what to do to know more."""
    silent = end(1, exit_code=1, step=4)
    found = await judged(case(ends=(lost_peer(0), silent, lost_peer(2), lost_peer(3))))
    assert (found.cause, found.kind, found.ranks) == ("user_code", "exit_code", (1,))
    assert "rank 1 (n0) exited with 1 after step 4, and wrote no error" in found.reason
    assert "everstep logs j --round 1 --rank 1" in found.reason


async def test_a_rank_that_is_done_before_the_others_has_left_them() -> None:
    """Exit code 0 amid the training (A7.1)."""
    done = end(2, how="done", exit_code=0)
    peers = tuple(map(lost_peer, (0, 1, 3)))
    found = await judged(case(ends=peers, done=(done,)))
    assert (found.cause, found.kind, found.ranks) == ("user_code", "left_early", (2,))
    assert "rank 2 exited with 0 while others continued" in found.reason


async def test_nobody_has_left_early_where_most_are_done_or_another_failed_first() -> None:
    done = tuple(end(rank, how="done", exit_code=0) for rank in (0, 1, 2))
    found = await judged(case(ends=(lost_peer(3),), done=done))
    assert found.kind != "left_early"
    root = raised(3, "ValueError", "batch 17 has no labels")
    found = await judged(case(ends=(lost_peer(1), root), done=done[:1]))
    assert (found.kind, found.ranks) == ("python_exception", (3,))


NO_FILE = "[Errno 2] No such file or directory: '/data/x'"
NO_WORKER = "DataLoader worker (pid 71) is killed by signal: Killed. "
NO_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"
TOO_LARGE = (
    "[enforce fail at /p/gloo/transport/tcp/pair.cc:466] op.preamble.length <= op.nbytes. 400 vs 4"
)
REFUSED = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate {} bytes. Error code 12 (Cannot allocate memory)"
)
KINDS: list[tuple[RankEnd, str, str]] = [
    (raised(3, "FileNotFoundError", NO_FILE), "configuration", "missing_file"),
    (raised(3, "ModuleNotFoundError", "No module named 'x'"), "configuration", "import_error"),
    (raised(3, "PermissionError", "[Errno 13] Permission denied"), "configuration", "permission"),
    (raised(3, "OSError", "[Errno 28] No space left on device"), "storage", "disk_full"),
    (raised(3, "torch.OutOfMemoryError", NO_MEMORY), "user_code", "gpu_oom"),
    (raised(3, "AssertionError", "the batch is empty"), "user_code", "assertion"),
    (raised(3, "RuntimeError", NO_WORKER), "unknown", "worker_killed"),
    (end(3, how="signal", exit_code=None, signal="SIGKILL"), "unknown", "killed"),
    (end(3, how="signal", exit_code=None, signal="SIGSEGV"), "unknown", "segfault"),
    (end(3, how="signal", exit_code=None, signal="SIGBUS"), "unknown", "bus_error"),
    (raised(3, "MemoryError", ""), "host", "host_oom"),
    (raised(3, "RuntimeError", REFUSED.format(8 << 30)), "host", "host_oom"),
    (raised(3, "RuntimeError", REFUSED.format(1 << 52)), "user_code", "absurd_size"),
    (end(3, how="out_of_memory", exit_code=None, signal="SIGKILL"), "host", "host_oom"),
    (
        end(3, exit_code=9, first_error="kernel: Out of memory: Killed process 7 (python)"),
        "user_code",
        "exit_code",
    ),
    (
        end(3, exit_code=9, first_error="NVRM: Xid (PCI:0000:3b:00): 79, pid=1, lost"),
        "user_code",
        "exit_code",
    ),
    (raised(3, "SystemExit", "2", place="", exit_code=2), "configuration", "arguments"),
]  # fmt: skip


@pytest.mark.parametrize(("one", "cause", "kind"), KINDS, ids=[row[2] for row in KINDS])
async def test_each_kind_of_end_has_its_cause_and_never_a_node(
    one: RankEnd, cause: str, kind: str
) -> None:
    """No node is named for what a rank did, though it ran there."""
    found = await judged(case(ends=(lost_peer(0), one)))
    assert (found.cause, found.kind) == (cause, kind)
    assert (found.ranks, found.nodes) == ((3,), ())


async def test_a_rank_that_was_sent_too_much_is_not_accused_for_it() -> None:
    """It or its peer differs from all others; the flight recorders know which (A4.1)."""
    of = case(ends=(lost_peer(0), raised(3, "RuntimeError", TOO_LARGE)))
    alone = await judged(of)
    assert (alone.cause, alone.kind, alone.ranks) == ("user_code", "size_mismatch", ())
    recorders = claim("user_code", 0.95, kind="mismatch", ranks=(2,), analyzer="flight_recorder")
    heard = await runner.AnalyzerRunner(PURE).run(of, nothing, 30.0)
    joined = combine(of, [*heard.claims, recorders], [])
    assert (joined.cause, joined.ranks) == ("user_code", (2,))
    assert joined.confidence > alone.confidence
    assert not joined.others


async def test_an_error_of_every_rank_is_one_failure_of_all() -> None:
    """1 000 ranks that fail alike are one incident with one culprit, the script (A7.1)."""
    alike = tuple(raised(rank, "NameError", "name 'lr' is not defined") for rank in range(1000))
    found = await judged(case(nodes=500, ends=alike))
    assert found.cause == "user_code"
    assert "every rank" in found.reason
    assert found.is_transient is False


async def test_the_same_failure_in_the_next_round_stops_being_transient() -> None:
    same = (raised(3, "ValueError", "bad"), raised(3, "ValueError", "bad", round=2))
    found = await judged(case(ends=same))
    assert (found.advice, found.is_transient) == ("stop", False)
    assert "came again" in found.reason


async def test_an_earlier_incident_counts_only_while_no_step_was_made_since() -> None:
    root = raised(3, "ValueError", "bad")
    name = rank_ends.fingerprint_of(root)
    before = PastIncident(
        job="j", incident="h", at=NOON, cause="user_code", fingerprint=name, step=7
    )
    found = await judged(case(ends=(root,), past=(before,), step=7))
    assert found.advice == "stop"
    found = await judged(case(ends=(root,), past=(before,), step=900))
    assert found.advice == "change"


async def test_steps_that_begin_at_0_in_each_round_are_no_progress() -> None:
    """The reports of the job were older at the incident before: only the ranks' own steps count."""
    root = raised(3, "ValueError", "bad", step=20)
    before = PastIncident(
        job="j", incident="h", at=NOON, cause="user_code",
        step=case(ends=(root,), step=1).last_step, fingerprint=rank_ends.fingerprint_of(root),
    )  # fmt: skip
    found = await judged(case(ends=(root,), past=(before,), step=20))
    assert found.advice == "stop"


async def test_a_signal_is_never_the_same_failure() -> None:
    """A4.2: whoever sent it to another rank yesterday says nothing about this rank."""
    killed = end(3, how="signal", exit_code=None, signal="SIGKILL")
    name = rank_ends.fingerprint_of(killed)
    before = PastIncident(job="k", incident="h", at=NOON, cause="unknown", fingerprint=name)
    of = case(ends=(lost_peer(0), killed))
    alone = await judged(of)
    for past in (before, replace(before, job="j")):
        assert (await judged(replace(of, past=(past,)))).confidence == alone.confidence
    twice = replace(of, ends=(*of.ends, replace(killed, round=2)))
    assert (await judged(twice)).advice == alone.advice


async def test_a_command_that_failed_is_an_exception_of_the_script() -> None:
    """A4.1: only a launcher's own line reports the end of a rank in the same words."""
    text = "Command '['false']' returned non-zero exit status 1."
    found = await judged(case(ends=(lost_peer(0), raised(3, "CalledProcessError", text))))
    assert (found.cause, found.kind, found.ranks) == ("user_code", "python_exception", (3,))


async def test_an_analyzer_that_fails_or_is_slow_is_named_and_delays_nobody() -> None:
    async def bad(_: object) -> list[object]:
        raise KeyError("a bug")

    async def slow(_: object) -> list[object]:
        await asyncio.Event().wait()
        return []

    async def odd(_: object) -> list[object]:
        return ["not a claim"]

    asked = runner.AnalyzerRunner({**PURE, "bad": bad, "slow": slow, "odd": odd})  # type: ignore[dict-item]
    heard = await asked.run(case(ends=(raised(3, "ValueError", "x"),)), nothing, 1.0)
    assert {one.analyzer for one in heard.claims} == {"ends"}
    assert [text.split()[1] for text in heard.missing] == ["bad", "slow", "odd"]
    assert heard.is_partial
    assert asked.failures == 3


async def test_secrets_and_control_characters_of_an_exception_are_not_repeated() -> None:
    secret = "postgresql://me:hunter2@db/x \x1b[2J"
    found = await judged(case(ends=(raised(3, "ValueError", secret),)))
    assert "hunter2" not in found.reason + found.fingerprint
    assert "\x1b" not in found.reason


ENVIRON = "File \"<frozen os>\", line 679, in __getitem__\nKeyError: 'DATA_ROOT'"
OWN = "File \"train.py\", line 8, in step\nKeyError: 'labels'"


@pytest.mark.parametrize(
    ("one", "ranks", "cause"),
    [
        (raised(0, "KeyError", "'DATA_ROOT'", traceback=ENVIRON), 1, "configuration"),
        (raised(0, "KeyError", "'labels'", traceback=OWN), 4, "user_code"),
        (raised(0, "json.decoder.JSONDecodeError", "Extra data"), 4, "configuration"),
        (raised(0, "json.decoder.JSONDecodeError", "Extra data"), 1, "user_code"),
        (raised(0, "json.decoder.JSONDecodeError", "Extra data", step=70), 4, "user_code"),
        (raised(0, "ValueError", "could not convert string to float: 'x'"), 4, "configuration"),
    ],
)
async def test_settings_that_no_rank_can_read_are_configuration(
    one: RankEnd, ranks: int, cause: str
) -> None:
    alike = tuple(replace(one, rank=rank, fact=f"e{rank}") for rank in range(ranks))
    assert (await judged(case(ends=alike))).cause == cause


async def test_ranks_that_differ_in_a_number_only_failed_alike() -> None:
    """Each names a file of its own."""
    texts = [f"[Errno 13] Permission denied: PosixPath('/scratch/a_{n}.sh')" for n in range(4)]
    ranks = (raised(n, "PermissionError", text, after_s=n) for n, text in enumerate(texts))
    found = await judged(case(ends=tuple(ranks)))
    assert (found.cause, found.ranks) == ("configuration", (0, 1, 2, 3))


async def test_a_script_that_handles_sigterm_was_ended_from_outside() -> None:
    """A12.4: it exits with 128 and the signal's number."""
    ends = tuple(raised(n, "SystemExit", "143", exit_code=143) for n in range(4))
    found = await judged(case(ends=ends))
    assert (found.cause, found.kind, found.ranks) == ("scheduler", "terminated", (0, 1, 2, 3))
    own = await judged(case(ends=(raised(0, "SystemExit", "3", exit_code=3),)))
    assert own.cause == "user_code"


@pytest.mark.parametrize(
    "own",
    [
        end(1, how="signal", signal="SIGTERM", exit_code=None),
        end(1, how="signal", signal="SIGHUP", exit_code=None),
        raised(1, "SystemExit", "143", exit_code=143),
    ],
)
async def test_nobody_is_known_to_have_sent_a_signal_to_one_rank_alone(own: RankEnd) -> None:
    """It may have sent it to itself; a scheduler, or a person who stops a job, ends all ranks."""
    alone = case(nodes=1, ends=(own, lost_peer(0)))
    found = await judged(alone)
    assert (found.cause, found.kind, found.ranks) == ("unknown", "signal", (1,))
    assert "no evidence shows" in found.reason
    assert "from outside" not in found.reason
    notice = OutsideAct(act="preempted", by="slurm", reason="SIGTERM", fact="p")
    left = NodeSign(node="n0", sign="left", reason="SIGTERM", fact="l", at=NOON,
                    cause="preempted")  # fmt: skip
    for known in (replace(alone, outside=(notice,)), replace(alone, nodes=(left,)),
                  replace(alone, ends=(own, replace(own, rank=0)))):  # fmt: skip
        assert (await judged(known)).cause == "scheduler"


async def test_a_full_disk_behind_an_exception_of_a_library_is_storages() -> None:
    """As torch.save reports it (A7.1)."""
    before = "OSError: [Errno 28] No space left on device\n\nDuring handling of the above exception"
    text = "[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"
    save = raised(0, "RuntimeError", text, traceback=f"{before}\nRuntimeError: {text}")
    found = await judged(case(ends=(save,)))
    assert (found.cause, found.kind, found.ranks) == ("storage", "disk_full", (0,))
    stream = "RuntimeError: basic_ios::clear: iostream error"  # as with a limit of file sizes
    limited = raised(0, "RuntimeError", text, traceback=f"{stream}\n\nRuntimeError: {text}")
    found = await judged(case(ends=(limited,)))
    assert (found.cause, found.kind, found.ranks) == ("storage", "storage", (0,))
    own = raised(0, "RuntimeError", text, traceback=f"KeyError: 'x'\nRuntimeError: {text}")
    assert (await judged(case(ends=(own,)))).cause == "user_code"


KILLED = end(3, how="signal", exit_code=None, signal="SIGKILL")


async def test_two_ranks_that_fail_by_themselves_at_once_are_both_named() -> None:
    """A7.2: nothing shows which was first, and neither explains the other."""
    error = raised(0, "RuntimeError", "fault A")
    crash = end(2, how="signal", exit_code=None, signal="SIGSEGV")
    found = await judged(case(ends=(error, lost_peer(1), crash)))
    assert (found.ranks, found.others, found.is_inconclusive) == ((0, 2), (), False)
    assert "fault A" in found.reason
    assert "SIGSEGV" in found.reason
    alone = await judged(case(ends=(error, lost_peer(1))))
    assert found.confidence < alone.confidence, "which of the two causes it is stays open"
    killed = end(2, how="signal", exit_code=None, signal="SIGKILL")
    both = await judged(case(ends=(error, lost_peer(1), killed)))
    assert both.ranks == (0, 2)
    assert both.reason.endswith("rank 1 lost another rank"), "nobody knows which"
    late = replace(killed, node="n0", at=NOON + timedelta(seconds=9))
    assert (await judged(case(ends=(error, late)))).ranks == (0,)


@pytest.mark.parametrize("name", ["SIGBUS", "SIGSEGV", "SIGABRT", "SIGILL", "SIGFPE"])
async def test_a_signal_that_a_process_may_have_sent_is_told_as_that(name: str) -> None:
    signalled = end(3, how="signal", exit_code=None, signal=name)
    found = await judged(case(ends=(lost_peer(0), signalled)))
    assert "or a process sent it this signal" in found.reason
    assert name != "SIGBUS" or found.retry == "unknown"
    two = await judged(case(ends=(replace(KILLED, rank=2), KILLED)))
    assert "ranks 2, 3 were killed" in two.reason


async def test_an_error_in_a_worker_of_the_loader_is_told_in_its_own_words() -> None:
    text = (
        "Caught ValueError in DataLoader worker process 0.\n"
        "Original Traceback (most recent call last):\n"
        "ValueError: sample 80 has a negative label\n"
    )
    found = await judged(case(ends=(raised(1, "ValueError", text),)))
    told = "raised ValueError: sample 80 has a negative label (in a worker of its data loader)"
    assert told in found.reason


async def test_a_failure_that_tells_little_is_the_same_only_in_its_job() -> None:
    """Two scripts that exit with 1, or two kills, have nothing in common."""
    names = {}
    for kind, one in {
        "code": end(3, exit_code=1),
        "signal": end(3, how="signal", exit_code=None, signal="SIGKILL"),
        "error": raised(3, "ValueError", "bad batch"),
    }.items():
        for job in ("a", "b"):
            found = await judged(case(job=job, ends=(lost_peer(0), one)))
            names[kind, job] = found.fingerprint
    assert names["code", "a"] != names["code", "b"]
    assert names["signal", "a"] != names["signal", "b"]
    assert names["error", "a"] == names["error", "b"] != ""


async def test_the_fingerprint_is_of_the_culprit() -> None:
    """No victim's failure names the incident, also where it has the same cause."""
    place = claim("network", 0.9, kind="connections_lost", fingerprint="", analyzer="ends")
    victim = claim("network", 0.6, ranks=(0,), fingerprint="observed:RuntimeError", analyzer="logs")
    verdict = combine(case(), [place, victim], ())
    assert "RuntimeError" not in verdict.fingerprint


async def test_a_failure_that_ends_round_after_round_is_the_incidents() -> None:
    """Round 1 lost its network, and rounds 2 to 6 raise the same: that is what needs a change."""
    ends_ = [lost_peer(rank) for rank in range(4)]
    ends_ += [raised(3, "ValueError", "batch 17 has no labels", round=n) for n in range(2, 7)]
    found = await judged(case(ends=tuple(ends_)))
    assert (found.cause, found.ranks, found.advice) == ("user_code", (3,), "stop")
    assert "it came again in 4 more rounds without a new step" in found.reason
    once = await judged(case(ends=tuple(ends_[:5])))
    assert once.cause == "network", "a second failure alone does not explain the first"


@pytest.mark.parametrize("code", [16, 17])
async def test_megatrons_rejected_results_are_not_the_scripts_fault(code: int) -> None:
    """Exit codes of its re-run machine; the same codes of another script are its own."""
    left = raised(
        2, "SystemExit", str(code), exit_code=code, traceback="megatron/training/training.py"
    )
    found = await judged(case(ends=(lost_peer(0), left)))
    assert (found.cause, found.kind, found.ranks) == ("unknown", "result_rejected", (2,))
    other = await judged(case(ends=(lost_peer(0), replace(left, traceback="train.py"))))
    assert other.cause == "user_code"


async def test_memory_of_a_gpu_is_not_tried_again_and_a_taken_port_is_once() -> None:
    """As NVRx's policies for restarts."""
    full = raised(3, "torch.OutOfMemoryError", NO_MEMORY)
    assert (await judged(case(ends=(lost_peer(0), full)))).advice == "stop"
    port = raised(3, "OSError", "[Errno 98] Address already in use")
    first = await judged(case(ends=(port,)))
    assert (first.cause, first.kind, first.advice) == ("network", "port_taken", "restart")
    again = await judged(case(ends=(port, replace(port, round=2))))
    assert (again.kind, again.advice) == ("port_taken", "stop")


@pytest.mark.parametrize(("interrupted", "cause"), [((2,), "unknown"), ((0, 1, 2, 3), "scheduler")])
async def test_a_person_who_cancels_a_job_interrupts_all_ranks(
    interrupted: tuple[int, ...], cause: str
) -> None:
    of = tuple(raised(rank, "KeyboardInterrupt", "") for rank in interrupted)
    found = await judged(case(ends=of))
    assert (found.cause, found.ranks) == (cause, interrupted)
    assert ("this process alone" in found.reason) == (cause == "unknown")
