"""The rules of the log analyzer: what lines mean, and what accuses no hardware."""

import time
from pathlib import Path

import pytest

from everstep_services.attribution.log_analysis.chunks import Shapes, shape_of
from everstep_services.attribution.log_analysis.files import analyze_files
from everstep_services.attribution.log_analysis.rules import shipped
from tests.unit.attribution.log_analysis.logs import raised

LINES = [
    ("node_failed", "srun: error: Task launch for StepId=8.0 failed on node n7: Job prolog failed"),
    ("configuration", "ValueError: … is larger than the available KV cache memory (7.41 GiB)."),
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
    ("ended_by_launcher", "Received 15 death signal, shutting down workers"),
    ("ended_by_launcher", "SignalException: Process 7 got signal: 15"),
    ("cancelled", "SignalException: Process 7 got signal: 1"),
    ("peer_lost", "NCCL WARN NET/IB : Got completion from peer 10.0.0.1<44206> with status=12"),
    ("network", "mlx5_core 0000:86:00.0 ib2: Link down"),
    ("network", "mlx5_core 0000:86:00.0: Port module event: module 0, Cable unplugged"),
    ("network", "n1:12:34 [0] NCCL WARN NET/IB : mlx5_0:1 Got async event : port error"),
    ("network", "NCCL WARN NET/IB : Got async event : port error"),
    ("network", "n1:12:34 [0] NCCL WARN NET/IB : mlx5_0:1 Got async error event: port error"),
    ("network", "n1:12:34 [0] NCCL WARN NET/IB : mlx5_0:1 async fatal event: local catastrophic"),
    ("node_failed", "srun: error: Node failure on gpu-17"),
    ("unschedulable", "FailedScheduling 0/9 nodes are available: 9 Insufficient nvidia.com/gpu."),
    ("configuration", "MisconfigurationException: No supported gpu backend found!"),
    ("corrupt_file", "RuntimeError: PytorchStreamReader failed reading zip archive"),
    ("checkpoint_mismatch", "RuntimeError: Error(s) in loading state_dict for GPT:"),
    (
        "silent_corruption",
        "RuntimeError: Rank 3, node n1, device 2, iteration #8: Possible persistent error!!",
    ),
    (
        "silent_corruption",
        "Rank 3, node n1, device 2, iteration #8: Possible transient error!!",
    ),
]


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
        "n1:12:34 [0] NCCL WARN NET/IB : mlx5_0:1 Got async error event: client reregistration",
    ],
)
def test_ordinary_lines_mean_nothing(line: str) -> None:
    assert shipped().match(line) is None


def test_rules_name_their_sources() -> None:
    rules = shipped()
    assert len({rule.id for rule in rules.rules}) == len(rules.rules)
    named = {name for rule in rules.rules for name in (rule.source, *rule.also)}
    assert named == set(rules.sources)
    assert all(
        rule.words and (rule.patterns or rule.kernel_patterns) and rule.means and rule.advice
        for rule in rules.rules
    )


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
    assert (report.cause.domain, report.cause.failure_class) == ("user_code", "python_exception")
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


KERNEL = [
    XID,
    "nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 12028, Fatal, Link 44",
    "kernel: Out of memory: Killed process 77 (python) total-vm:1000kB",
    "Out of memory: Killed process 77 (python) total-vm:1000kB",
    "mce: [Hardware Error]: Machine Check Exception: 5 Bank 1",
    "Kernel panic - not syncing: Fatal hardware error!",
    "mlx5_core 0000:86:00.0 ib2: Link down",
    "EXT4-fs error (device nvme0n1p2): ext4_find_entry:1455",
    "python[88]: segfault at 0 ip 00007f sp 00007f error 4",
    "traps: python[88] trap invalid opcode ip:7f",
    "[ 4711.42] nfs: server filer01 not responding, timed out",
]


@pytest.mark.parametrize("line", KERNEL)
@pytest.mark.parametrize("prefix", ["[rank0]: ", "[default0]:", "n1:0| "])
def test_a_rank_does_not_write_lines_of_the_kernel(prefix: str, line: str, tmp_path: Path) -> None:
    """A7.3: what a script prints in the form of the kernel loses against an exception."""
    path = tmp_path / "log"
    path.write_text(f"{prefix}step 1\n{prefix}{line}\n")
    alone = analyze_files([path]).report()
    assert (alone.verdict, alone.culprits) == ("inconclusive", ())
    assert "the kernel's log" in alone.missing[0]
    path.write_text(path.read_text() + raised("ValueError: own bug", "[rank1]: "))
    report = analyze_files([path]).report()
    assert report.cause is not None
    assert (report.cause.fingerprint, report.weight) == (
        "observed:ValueError:step:own bug", 0.95,
    )  # fmt: skip


@pytest.mark.parametrize("line", KERNEL)
@pytest.mark.parametrize("head", ["Nov 26 04:00:00 n1 kernel: ", ""])
def test_the_kernel_writes_lines_of_the_kernel(head: str, line: str, tmp_path: Path) -> None:
    """The same lines in a kernel's log, and in a job's log that syslog went into."""
    path = tmp_path / "kern.log"
    path.write_text(f"{head}{line}\n")
    report = analyze_files([path]).report()
    assert report.cause is not None
    assert (report.verdict, report.cause.role == "hint") == ("cause", False)


def test_a_launcher_may_report_a_kill_for_memory(tmp_path: Path) -> None:
    """Slurm's line with a label of a task counts as before: it is not the kernel's."""
    path = tmp_path / "log"
    path.write_text("3: slurmstepd: error: Detected 1 oom_kill event in StepId=12.0.\n")
    report = analyze_files([path]).report()
    assert report.cause is not None
    assert (report.verdict, report.cause.failure_class) == ("cause", "host_oom")


KNOWN = [
    ("Bus error (core dumped)", "unknown", "the memory behind a file mapping is gone"),
    ("Fatal Python error: Bus error", "unknown", "the memory behind a file mapping is gone"),
    (
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that "
        "dataloader's workers are out of shared memory.",
        "host",
        "the data loader reports too little shared memory (/dev/shm)",
    ),
    ("MemoryError", "host", "memory was refused"),
    (
        "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate "
        "4503599627370496 bytes. Error code 12 (Cannot allocate memory)",
        "user_code",
        "the script asked for more memory than any host has",
    ),
    (
        "RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate "
        "8589934592 bytes. Error code 12 (Cannot allocate memory)",
        "host",
        "memory was refused",
    ),
    (
        "numpy._core._exceptions._ArrayMemoryError: Unable to allocate 8.00 PiB for an array",
        "user_code",
        "the script asked for more memory than any host has",
    ),
]


@pytest.mark.parametrize(("line", "domain", "means"), KNOWN)
def test_a_line_means_no_more_than_it_says(
    line: str, domain: str, means: str, tmp_path: Path
) -> None:
    """A11.1: nobody knows from a bus error that /dev/shm was full, or that a host was short."""
    path = tmp_path / "log"
    path.write_text(f"[rank1]: {line}\n")
    report = analyze_files([path]).report()
    assert report.cause is not None
    assert (report.cause.domain, report.cause.means) == (domain, means)


def test_the_gpu_that_megatron_calls_broken_is_that_of_the_run_before() -> None:
    """The line names the node on which the result was right."""
    line = "Rank 3, node n1, device 2, iteration #8: Possible {} error!!"
    here = [shipped().match(line.format(kind)) for kind in ("transient", "persistent")]
    assert [match and match.groups.get("node") for match in here] == ["n1", None]
    assert [match and match.groups.get("rank") for match in here] == ["3", "3"]
