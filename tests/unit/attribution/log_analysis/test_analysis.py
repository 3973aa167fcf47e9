"""The log analyzer: what lines mean, whose they are, and which failure began it."""

import gzip
import io
import json
import time
from pathlib import Path

import pytest

from everstep.settings import remember_secret
from everstep_services.attribution.log_analysis import clocks, fingerprint
from everstep_services.attribution.log_analysis.chunks import LogFile, Shapes, shape_of
from everstep_services.attribution.log_analysis.files import analyze_files
from everstep_services.attribution.log_analysis.origins import of_file, of_line
from everstep_services.attribution.log_analysis.report import LogReport, lines
from everstep_services.attribution.log_analysis.rules import shipped
from everstep_services.cli.__main__ import main
from tests.fakes import failure_logs

LINES = [
    ("nvlink", "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Fatal, Link 44"),
    ("gpu_fault", "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."),
    ("cuda_error", "NVRM: Xid (PCI:0000:3b:00): 31, pid=1, name=python, MMU Fault"),
    ("gpu_ecc", "CUDA error: uncorrectable ECC error encountered"),
    ("gpu_oom", "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
    ("host_oom", "Memory cgroup out of memory: Killed process 99 (python) total-vm:1kB"),
    ("host_oom", "slurmstepd: error: Detected 1 oom_kill event in StepId=12.0."),
    ("host_hardware", "mce: [Hardware Error]: Machine Check Exception: 5 Bank 1"),
    ("peer_lost", "ncclRemoteError: A call failed possibly due to a network error"),
    ("peer_lost", "[pair.cc:534] Connection closed by peer [10.0.0.5]:2345"),
    ("ended_by_launcher", "api.py:900] Sending process 88 closing signal SIGTERM"),
    ("ended_by_launcher", "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"),
    (
        "collective_timeout",
        "[Rank 3] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7)",
    ),
    ("collective_timeout", "Timed out waiting 1800000ms for recv operation to complete"),
    ("nccl_error", "ncclUnhandledCudaError: Call to CUDA function failed."),
    (
        "nccl_usage",
        "NCCL WARN Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1a000",
    ),
    ("device_assert", "Indexing.cu:1290: block: [0,0,0] Assertion `srcIndex < n` failed."),
    ("nan", "iteration 40: lm loss: nan"),
    ("disk_full", "OSError: [Errno 28] No space left on device"),
    ("quota", "OSError: [Errno 122] Disk quota exceeded"),
    ("bus_error", "unable to write to file </torch_88_1>: No space"),
    ("data_loader", "RuntimeError: DataLoader worker (pid 88) is killed by signal: Killed."),
    ("storage", "nfs: server filer not responding, still trying"),
    ("missing_file", "FileNotFoundError: [Errno 2] No such file or directory: 'x'"),
    ("import_error", "ImportError: libx.so: cannot open shared object file: No such file"),
    ("permission", "PermissionError: [Errno 13] Permission denied: 'x'"),
    ("network", "socket.gaierror: [Errno -2] Name or service not known"),
    ("time_limit", "*** JOB 1 ON n1 CANCELLED AT 2026-11-02T03:11:11 DUE TO TIME LIMIT ***"),
    ("preempted", "*** STEP 1.0 ON n1 CANCELLED AT 2026-11-02T03:11:11 DUE TO PREEMPTION ***"),
    ("cancelled", "*** JOB 1 ON n1 CANCELLED AT 2026-11-02T03:11:11 ***"),
    ("segfault", "python[88]: segfault at 0 ip 00007f sp 00007f error 4"),
    ("illegal_instruction", "traps: python[88] trap invalid opcode ip:7f"),
    ("killed", "failed (exitcode: -9) local_rank: 0 (pid: 88) of binary: python"),
    ("assertion", "AssertionError: empty"),
    ("arguments", "train.py: error: unrecognized arguments: --x"),
    ("cancelled", "slurmstepd: error: *** STEP 1.0 ON n1 CANCELLED AT 2026-11-02T03:11:11 ***"),
    (
        "ended_by_launcher",
        "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.",
    ),
    (
        "killed",
        "[rank: 3] Child process with PID 88 terminated with code -9. Forcefully terminating",
    ),
    ("exited", "srun: error: n1: task 3: Exited with exit code 1"),
    ("host_oom", "srun: error: nid001277: tasks 1-3: Out Of Memory"),
    ("peer_lost", "NCCL WARN NET/IB : Got completion from peer 10.0.0.1<44206> with status=12"),
    ("network", "mlx5_core 0000:86:00.0 ib2: Link down"),
    ("node_failed", "srun: error: Node failure on gpu-17"),
    ("unschedulable", "FailedScheduling 0/9 nodes are available: 9 Insufficient nvidia.com/gpu."),
    ("configuration", "MisconfigurationException: No supported gpu backend found!"),
    ("corrupt_file", "RuntimeError: PytorchStreamReader failed reading zip archive"),
    ("checkpoint_mismatch", "RuntimeError: Error(s) in loading state_dict for GPT:"),
    (
        "silent_corruption",
        "RuntimeError: Rank 3, node n1, device 2, iteration #8: Possible persistent error!!",
    ),
]


def written(folder: Path, **files: str) -> LogReport:
    paths = []
    for name, content in files.items():
        paths.append(folder / f"{name.replace('_', '-')}.log")
        paths[-1].write_text(content)
    return analyze_files(paths).report()


def raised(last: str, prefix: str = "") -> str:
    texts = [
        "Traceback (most recent call last):",
        '  File "/home/u/train.py", line 9, in step',
        "    x = y[3]",
        last,
    ]
    return "".join(f"{prefix}{text}\n" for text in texts)


@pytest.mark.parametrize(("failure_class", "line"), LINES)
def test_a_line_means_its_class(failure_class: str, line: str) -> None:
    """Forms that the programs print; and a word of the rules is in each."""
    match = shipped().match(line)
    assert match is not None
    assert match.rule.failure_class == failure_class
    shape = shape_of(line.encode())
    shapes = Shapes(shipped().words)
    shapes.learn({shape})
    assert shape not in shapes.quiet


@pytest.mark.parametrize(
    "line",
    [
        "iteration 7 | lm loss: 2.1 | number of nan iterations: 0 |",
        "INFO timeouts after 30 s are retried",
        "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x0 (-)",
        "warming up the loader",
    ],
)
def test_ordinary_lines_mean_nothing(line: str) -> None:
    assert shipped().match(line) is None


def test_rules_name_their_sources() -> None:
    rules = shipped()
    assert len({rule.id for rule in rules.rules}) == len(rules.rules)
    named = {name for rule in rules.rules for name in (rule.source, *rule.also)}
    assert named == set(rules.sources)
    assert all(rule.words and rule.patterns and rule.means and rule.advice for rule in rules.rules)


@pytest.mark.parametrize(
    ("line", "rank", "node", "rest"),
    [
        ("[rank3]:   File", 3, "", "  File"),
        ("[default1]:[rank9]: x", 9, "", "x"),
        ("2: [rank17]: x", 17, "", "x"),
        ("node-07:12| x", 12, "node-07", "x"),
        ("[E1102 x.cpp:1] [Rank 5] Watchdog", 5, "", "[E1102 x.cpp:1] [Rank 5] Watchdog"),
        ("Nov  2 03:11:11 gpu-4 kernel: NVRM", None, "gpu-4", "NVRM"),
        ("plain", None, "", "plain"),
        ("[1,9]<stderr>:x", 9, "", "x"),
        ("[pod/llama-worker-3/pytorch] [rank24]: x", 24, "llama-worker-3", "x"),
        ("(RayTrainWorker pid=88, ip=10.0.0.3) [rank9]: x", 9, "10.0.0.3", "x"),
        ("2026-11-02T03:11:11.123456789Z stderr F [rank9]: x", 9, "", "x"),
        ('{"log":"[rank9]: x\\n","stream":"stderr"}', 9, "", "x"),
        (
            "[PG ID 0 PG GUID 0(default_pg) Rank 5] x",
            5,
            "",
            "[PG ID 0 PG GUID 0(default_pg) Rank 5] x",
        ),
        ("gpu7:984:1357 [4] NCCL WARN x", None, "gpu7", "gpu7:984:1357 [4] NCCL WARN x"),
    ],
)
def test_origin_of_a_line(line: str, rank: int | None, node: str, rest: str) -> None:
    origin, text = of_line(line, of_file(0, Path("job.log")))
    assert (origin.rank, origin.node, text) == (rank, node, rest)


def test_origin_of_a_file() -> None:
    assert of_file(0, Path("logs/llama/round-2/rank-12/stderr")).rank == 12
    assert of_file(0, Path("out/attempt_0/3/stderr.log")).member == "local rank 3"


def test_fingerprint_has_no_volatile_part() -> None:
    one = "2026-11-02 03:11:11 rank 3 pid 88 step 12: shape [4096, 8] at 0x7f00 of 2.5 GiB"
    other = "2027-01-02 13:01:10 rank 7 pid 9 step 940: shape [17, 64] at 0xff of 900 MiB"
    assert fingerprint.normalised(one) == fingerprint.normalised(other)
    name = fingerprint.of_exception("a.b.KeyError", "step", "token 17")
    assert name == "observed:KeyError:step:token n"


def test_interleaved_tracebacks_are_told_apart(tmp_path: Path) -> None:
    """A4.5: the one that raised, not those that lost it, however their lines are mixed."""
    own = raised("KeyError: 'tokens'", "[rank3]: ").splitlines()
    lost = raised("RuntimeError: Connection closed by peer [10.0.0.5]:1", "[rank1]: ").splitlines()
    mixed = [line for pair in zip(lost, own, strict=True) for line in pair]
    report = written(tmp_path, job="\n".join(mixed))
    assert (report.verdict, report.culprits) == ("cause", (3,))
    assert report.cause is not None
    assert report.cause.frames == ("/home/u/train.py:9 in step",)
    assert report.cause.line == 8
    assert report.cascades == {"peer_lost": 1}
    text = list(lines(report))
    assert text[0].startswith("python_exception (user code): rank 3: ")
    assert "KeyError: 'tokens'" in text[1]


def test_cascades_alone_are_inconclusive(tmp_path: Path) -> None:
    """A4.6: without the log of the culprit the report names what is missing."""
    lost = "RuntimeError: Connection closed by peer [10.0.0.5]:1"
    report = written(tmp_path, job=raised(lost, "[rank0]: ") + raised(lost, "[rank1]: "))
    assert (report.verdict, report.culprits) == ("inconclusive", ())
    assert report.missing


def test_a_rank_that_peers_name_is_the_culprit(tmp_path: Path) -> None:
    line = (
        "RuntimeError: Rank 0 successfully reached monitoredBarrier, but received errors while "
        "waiting for send/recv from rank 2. Please check rank 2 logs for faulty rank."
    )
    report = written(tmp_path, job=raised(line, "[rank0]: "))
    assert (report.verdict, report.culprits) == ("cause", (2,))


def test_the_rank_that_entered_fewer_collectives(tmp_path: Path) -> None:
    line = (
        "[rank{0}]:[E1102 x.cpp:629] [Rank {0}] Watchdog caught collective operation timeout: "
        "WorkNCCL(SeqNum={1}, OpType=ALLREDUCE)\n"
        "[rank{0}]: [Rank {0}] last enqueued NCCL work: {1}, last completed NCCL work: 4.\n"
    )
    numbers = [9, 9, 8, 9]
    text = "".join(line.format(rank, number) for rank, number in enumerate(numbers))
    report = written(tmp_path, job=text)
    assert report.culprits == (2,)
    assert report.cause is not None
    assert report.cause.failure_class == "collective_timeout"


def test_what_training_outlived_is_not_the_cause(tmp_path: Path) -> None:
    """A4.2: a handled failure, and then steps."""
    steps = "".join(f"[rank0]: step {step} loss 2.0\n" for step in range(5))
    text = (
        raised("ValueError: bad record", "[rank0]: ") + steps + raised("KeyError: 3", "[rank1]: ")
    )
    assert written(tmp_path, job=text).culprits == (1,)


def test_ranks_that_fail_alike_are_all_named(tmp_path: Path) -> None:
    """A4.1: a deterministic error; clocks of nodes are not believed."""
    texts = {
        f"rank_{rank}": raised("ModuleNotFoundError: No module named 'x'") for rank in range(4)
    }
    report = written(tmp_path, **texts)
    assert report.culprits == (0, 1, 2, 3)
    assert report.cause is not None
    assert report.cause.failure_class == "import_error"
    assert report.missing


@pytest.mark.parametrize("failure_class", failure_logs.CLASSES)
def test_64_ranks_with_skewed_clocks(failure_class: str, tmp_path: Path) -> None:
    """A4.5, A7.6: cascades of 63 ranks; clocks of nodes up to 5 minutes wrong."""
    truth = failure_logs.write(tmp_path, failure_class, seed=1)
    report = analyze_files(truth.paths).report()
    assert report.cause is not None
    assert (report.verdict, report.cause.failure_class) == ("cause", failure_class)
    if truth.rank is not None:
        assert report.culprits == (truth.rank,)
    if truth.node:
        assert report.cause.node == truth.node


@pytest.mark.parametrize(
    ("kind", "verdict"),
    [(failure_logs.HEALTHY, "nothing"), (failure_logs.ONLY_LOST, "inconclusive")],
)
def test_without_a_cause_nobody_is_named(kind: str, verdict: str, tmp_path: Path) -> None:
    """A4.6: a log of a job that is well; logs of all nodes but the culprit's."""
    report = analyze_files(failure_logs.write(tmp_path, kind, seed=1).paths).report()
    assert (report.verdict, report.culprits) == (verdict, ())


def steps(ahead_s: int) -> str:
    lines = []
    for step in range(1, 6):
        minute, second = divmod(60 * step + 600 + ahead_s, 60)
        lines.append(f"2026-11-02 03:{minute:02}:{second:02} step {step} loss 2\n")
    return "".join(lines)


def test_the_first_of_ranks_that_fail_alike_by_learned_clocks(tmp_path: Path) -> None:
    """A7.6: rank 1's clock is 5 minutes ahead; steps of both tell that it was first."""
    text = "CUDA error: an illegal memory access was encountered"
    report = written(
        tmp_path,
        rank_0=steps(0) + f"2026-11-02 03:15:40 {text}\n",
        rank_1=steps(300) + f"2026-11-02 03:20:05 {text}\n",
    )
    assert report.culprits == (1,)


def test_clocks_that_nothing_is_known_of_decide_nothing(tmp_path: Path) -> None:
    text = "CUDA error: an illegal memory access was encountered"
    report = written(
        tmp_path,
        rank_0=f"2026-11-02 03:15:40 {text}\n",
        rank_1=f"2026-11-02 03:20:05 {text}\n",
    )
    assert report.culprits == (0, 1)


def test_a_clock_does_not_outvote_a_cause(tmp_path: Path) -> None:
    """A lost connection that a clock puts an hour earlier stays a consequence."""
    report = written(
        tmp_path,
        rank_0="2026-11-02 02:15:40 Connection closed by peer [10.0.0.5]:1\n",
        rank_1="2026-11-02 03:20:05 CUDA error: misaligned address\n",
    )
    assert report.culprits == (1,)


@pytest.mark.parametrize(
    "text",
    [
        "[2026-11-02 03:11:11,500] x",
        "2026/11/02 03:11:11.5 x",
        "I1102 03:11:11.500000 4711 train.py:71] x",
        "[rank2]:[E1102 03:11:11.500000000 ProcessGroupNCCL.cpp:632] x",
    ],
)
def test_times_of_usual_formats(text: str) -> None:
    assert clocks.seconds(text, 2026) == clocks.seconds("2026-11-02T03:11:11.5", 2026)


@pytest.mark.parametrize(
    "text", ["step 4711", "9999-99-99 99:99:99", "E9999 99:99:99.1", "Foo 41 99:99:99"]
)
def test_what_is_no_time(text: str) -> None:
    assert clocks.seconds(text, 2026) is None


def test_an_old_line_of_the_kernel_is_not_the_cause(tmp_path: Path) -> None:
    """Training went on for days after it, by any clock."""
    old = "Oct 28 03:11:11 node-0 kernel: NVRM: Xid (PCI:0000:3b:00): 79, pid=1, name=python\n"
    report = written(tmp_path, rank_0=steps(0) + raised("KeyError: 'tokens'"), z_kern=old)
    assert report.culprits == (0,)


@pytest.mark.parametrize("size", [2_000, 200_000, 3 << 20])
def test_words_far_into_a_long_line(size: int, tmp_path: Path) -> None:
    text = f'[rank3]: {{"args": "{"x" * size}", "message": "CUDA out of memory. Tried 2 GiB"}}\n'
    report = written(tmp_path, job=text)
    assert report.cause is not None
    assert report.cause.failure_class == "gpu_oom"
    assert report.culprits == ((3,) if size < 1 << 20 else ())


def test_a_failure_behind_a_progress_bar(tmp_path: Path) -> None:
    """A bar overwrites its line for days and has no end of line."""
    bar = "".join(f"\r {part % 100}%|███| {part}/99999 [1.1it/s]" for part in range(40_000))
    report = written(tmp_path, job=f"{bar}{raised('KeyError: 3')}")
    assert report.cause is not None
    assert (report.cause.failure_class, report.cause.line) == ("python_exception", 4)


@pytest.mark.parametrize("encoding", ["utf-16", "latin-1"])
def test_other_encodings(encoding: str, tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    path.write_bytes(f"é\n{raised('KeyError: 3', '[rank3]: ')}".encode(encoding))
    assert analyze_files([path]).report().culprits == (3,)


def test_colours_are_looked_through(tmp_path: Path) -> None:
    text = raised("\x1b[1;35mKeyError\x1b[0m: \x1b[35m'tokens'\x1b[0m", "[rank3]: ")
    report = written(tmp_path, job=text)
    assert report.cause is not None
    assert report.cause.fingerprint == "observed:KeyError:step:'tokens'"


def test_a_compressed_log_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    path = tmp_path / "job.log.gz"
    whole = gzip.compress(raised("KeyError: 3", "[rank3]: ").encode() + b"x y z\n" * 9000)
    path.write_bytes(whole)
    assert analyze_files([path]).report().culprits == (3,)
    path.write_bytes(whole[:-12])
    analysis = analyze_files([path])
    assert analysis.notes == [f"{path} is cut short or damaged (gzip): read up to there"]


@pytest.mark.parametrize(
    ("content", "note"),
    [
        (b"", "is empty"),
        (b"\x28\xb5\x2f\xfdabc", "is compressed (zstd): unpack it first"),
        (b"PK\x03\x04abc", "is compressed (zip): unpack it first"),
    ],
)
def test_files_without_lines(content: bytes, note: str, tmp_path: Path) -> None:
    """A13.3: one clear line."""
    path = tmp_path / "job.log"
    path.write_bytes(content)
    analysis = analyze_files([path])
    assert analysis.notes == [f"{path} {note}"]
    assert analysis.report().verdict == "nothing"


def test_what_is_not_a_file(tmp_path: Path) -> None:
    """A13.3: a folder; a name that no file system has."""
    analysis = analyze_files([tmp_path, tmp_path / ("deep/" * 2000)])
    assert analysis.notes[0] == f"{tmp_path} is a folder: name the files in it"
    assert analysis.notes[1].endswith(" cannot be read: File name too long")
    assert len(analysis.notes[1]) < 400


@pytest.mark.parametrize(
    "before",
    [
        bytes(range(256)) * 999 + b"\n",
        b"\0" * 5000 + b"\n",
        b"x" * (5 << 20) + b"\n",
        b"\xff\xfe\n",
    ],
)
def test_hostile_content_hides_nothing(before: bytes, tmp_path: Path) -> None:
    """A13.3: binary, NULs, a line without end, another encoding."""
    path = tmp_path / "job.log"
    path.write_bytes(before + raised("KeyError: 'tokens'", "[rank3]: ").encode())
    assert analyze_files([path]).report().culprits == (3,)


def test_a_line_without_end_is_not_kept(tmp_path: Path) -> None:
    shapes = Shapes(shipped().words)
    log = LogFile(io.BytesIO(b"x" * (9 << 20)), shapes)
    assert list(log.loud_lines()) == []
    assert (log.lines, log.bytes) == (1, 9 << 20)


def test_command_prints_text_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "job.log"
    path.write_text(raised("KeyError: 'tokens'", "[rank3]: "))
    assert main(["logs", "analyze", str(path)]) == 3
    assert "rank 3" in capsys.readouterr().out.splitlines()[0]
    assert main(["logs", "analyze", str(path), "-o", "json"]) == 3
    record = json.loads(capsys.readouterr().out)
    assert record["schema"] == "everstep.log-report/v1"
    assert record["report"]["culprits"] == [3]
    path.write_text("step 1 loss 2\n")
    assert main(["logs", "analyze", str(path)]) == 0
    capsys.readouterr()
    assert main(["logs", "analyze", str(tmp_path / "none.log")]) == 2
    assert "none.log does not exist" in capsys.readouterr().err


def test_secrets_are_masked(tmp_path: Path) -> None:
    remember_secret("correct-horse-battery")
    text = "ValueError: correct-horse-battery evs_abcdefgh https://u:geheim@host \x1b]0;x\x07"
    report = written(tmp_path, job=raised(text, "[rank0]: "))
    shown = "\n".join(lines(report))
    for secret in ("correct-horse", "abcdefgh", "geheim", "\x1b"):
        assert secret not in shown


ECC = "CUDA error: uncorrectable ECC error encountered"
XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus."


@pytest.mark.parametrize(
    ("code", "end"),
    [
        (f'x = batch["tokens"]  # was once: {ECC}', "KeyError: 'tokens'"),
        (f'raise KeyError("{XID}")', f"KeyError: '{XID}'"),
        ("assert not text", "AssertionError: slurmstepd: error: CANCELLED DUE TO TIME LIMIT"),
    ],
)
@pytest.mark.parametrize("prefix", ["", "[rank1]: ", "1: "])
def test_what_a_script_quotes_accuses_no_hardware(
    prefix: str, code: str, end: str, tmp_path: Path
) -> None:
    """A7.3: neither a line of its code, nor the text of an exception of its own."""
    log = ["Traceback (most recent call last):", '  File "t.py", line 3, in f', f"    {code}", end]
    path = tmp_path / "log"
    path.write_text("".join(f"{prefix}{line}\n" for line in log))
    report = analyze_files([path]).report()
    assert report.cause is not None
    assert (report.cause.domain, report.cause.failure_class) == ("user code", "python_exception")
    assert not [one for one in report.alternatives if one.domain in {"gpu", "scheduler"}]


@pytest.mark.parametrize(
    "sentence",
    [
        f"INFO note: last week this node had {XID}",
        f"WARNING: restarted because of {XID}",
        f"the driver reported {ECC} on GPU 3, so we moved",
        "run 7 was lost to an uncorrectable ECC error; see the ticket",
        "INFO: if GPU has fallen off the bus, ask for another node",
        "docs: an NVLink fatal error is followed by Xid 74",
        "we once saw CUDA error: uncorrectable ECC error encountered",
        "training log of: mce: [Hardware Error]: CPU 31: Machine Check Exception: 5",
        "see SXid (PCI:0000:c1:00.0): 12028, Fatal, Link 44",
    ],
)
@pytest.mark.parametrize("prefix", ["", "[rank1]: ", "1: "])
def test_a_sentence_about_broken_hardware_accuses_none(
    prefix: str, sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "log"
    path.write_text(f"step 1\n{prefix}{sentence}\n")
    report = analyze_files([path]).report()
    found = [*([report.cause] if report.cause else []), *report.alternatives]
    assert not [one for one in found if one.domain in {"gpu", "host"}]


@pytest.mark.parametrize(
    "line",
    [
        XID,
        f"[  812.5] {XID}",
        f"[Mon Nov  2 03:11:11 2026] {XID}",
        f"Nov  2 03:11:11 node-3 kernel: [  812.5] {XID}",
        f"2026-11-02T03:11:11+00:00 node-3 kernel: {XID}",
        f"<3>[  812.5] {XID}",
        "RuntimeError: CUDA error: uncorrectable ECC error encountered",
        "  what():  CUDA error: uncorrectable ECC error encountered",
        "n1:88:99 [0] enqueue.cc:1 NCCL WARN Cuda failure 214 'uncorrectable ECC error'",
        "[E1102 03:11:11.000000000 ProcessGroupNCCL.cpp:1895] [PG 0 Rank 1] Process group watchdog "
        "thread terminated with exception: CUDA error: uncorrectable ECC error encountered",
    ],
)
def test_hardware_is_believed_in_the_form_of_its_driver(line: str, tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(f"step 1\n{line}\n")
    report = analyze_files([path]).report()
    assert report.cause is not None
    assert report.cause.domain == "gpu"


@pytest.mark.parametrize("head", ["1" * 3000, "[1] " * 900, "<1>" * 900, "kernel: " * 400])
def test_a_long_head_takes_no_time(head: str) -> None:
    began = time.process_time()
    shipped().match(f"{head} x {XID}")
    shipped().match(f"{head} x {ECC}")
    assert time.process_time() - began < 1


def test_what_finalizers_raise_ends_nothing(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text(
        "step 1\nException ignored in: <function X.__del__ at 0x7f>\n"
        'Traceback (most recent call last):\n  File "t.py", line 3, in __del__\n'
        "AttributeError: x\n"
    )
    assert analyze_files([path]).report().verdict == "nothing"
