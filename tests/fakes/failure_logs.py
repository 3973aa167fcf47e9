"""Logs of trainings that fail, with labels: which class, on which rank or node.

A seed chooses the launcher's layout, the format of times and progress, the words of the failure,
the rank, what the other ranks write when they lose it, the order in which lines reach a file,
noise, failures that training outlives, colours, encodings, and a clock of its own for each node,
up to 5 minutes wrong. The lines have the forms that the programs print; words that vary are drawn.
"""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path

from tests.fakes.failure_lines import (
    BEHIND,
    FIRST_LINES,
    HELD_OUT,
    KILLED,
    LOOKALIKES,
    LOST,
    NOISE,
    OF_LAUNCHERS,
    OF_NODES,
    OF_SCHEDULERS,
    RAISED,
    SLOW,
    WRITTEN,
)

RANKS_A_NODE = 8
_SKEW_S = 300
_STEPS = 8
HEALTHY, ONLY_LOST = "healthy", "only_lost"
CLASSES = tuple(
    sorted({*RAISED, *WRITTEN, *OF_NODES, *OF_SCHEDULERS, *OF_LAUNCHERS, BEHIND, KILLED})
)
WITHOUT_CAUSE = (HEALTHY, ONLY_LOST)
"""No cause may be named: nothing failed, or the log of the culprit is not there."""


@dataclass(frozen=True, slots=True)
class Labelled:
    """Logs, and the truth."""

    failure_class: str
    rank: int | None
    node: str
    paths: Sequence[Path]


class _Writer:
    """Writes lines in one layout, with the times of one format, by the clock of each node."""

    def __init__(self, folder: Path, dice: random.Random, world: int) -> None:
        self._layout = dice.choice(tuple(_LAYOUTS))
        self._folder = folder
        self._lines: dict[str, list[str]] = {}
        nodes = (world + RANKS_A_NODE - 1) // RANKS_A_NODE
        self._skews = [dice.uniform(-_SKEW_S, _SKEW_S) for _ in range(nodes)]
        self._stamp = dice.choice(_STAMPS)
        self._progress = dice.choice(_PROGRESS)
        self._is_coloured = dice.randrange(4) == 0
        self._is_alone = dice.randrange(4) == 0
        """Whether only one rank prints progress."""
        self._name = dice.choice(("node-{}", "gpu{:03}", "worker{}", "ip-10-0-0-{}"))
        self.now = datetime(2026, 11, 2, 3, 0)  # noqa: DTZ001

    def node(self, rank: int) -> str:
        return self._name.format(rank // RANKS_A_NODE)

    def of_rank(self, rank: int, line: str) -> None:
        name, text = _LAYOUTS[self._layout](self, rank, line)
        self._put(name, text)

    def step(self, rank: int, step: int, loss: float) -> None:
        if self._is_alone and rank:
            return
        self.of_rank(rank, self._stamp(self.time(rank)) + self._progress(step, loss))

    def raised(self, rank: int, text: str) -> list[str]:
        """A traceback, as Python or rich print it."""
        lines = text.split("\n")
        if self._is_coloured:
            kind, colon, rest = lines[0].partition(":")
            lines[0] = f"\x1b[1;35m{kind}\x1b[0m{colon}\x1b[35m{rest}\x1b[0m"
        return [
            "Traceback (most recent call last):",
            '  File "/home/u/train.py", line 88, in <module>',
            "    main()",
            '  File "/home/u/train.py", line 61, in main',
            "    loss = step(batch)",
            '  File "/usr/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1751, in '
            "_call_impl",
            "    return forward_call(*args, **kwargs)",
            *lines,
        ]

    def of_kernel(self, rank: int, line: str) -> None:
        at = self.time(rank)
        node = self.node(rank)
        self._put("kern.log", f"{at:%b %d %H:%M:%S} {node} kernel: [ 4711.42] {line}")

    def of_launcher(self, line: str) -> None:
        own = {"files": "launcher.log", "torchrun": "node-0.log", "srun": "slurm-4711.out"}
        self._put(own.get(self._layout, "all.log"), line)

    def time(self, rank: int) -> datetime:
        """What the clock of the rank's node shows."""
        return self.now + timedelta(seconds=self._skews[rank // RANKS_A_NODE])

    def forget_node(self, rank: int) -> None:
        """The log of the rank's node was never collected."""
        first = rank - rank % RANKS_A_NODE
        for lost in range(first, first + RANKS_A_NODE):
            name, prefix = _LAYOUTS[self._layout](self, lost, "")
            is_own = name.startswith(f"rank-{lost}.")
            prefix = prefix.split("[rank")[0] + f"[rank{lost}]" if "[rank" in prefix else prefix
            kept = [
                line
                for line in self._lines.pop(name, [])
                if not is_own and not line.startswith(prefix) and f"[rank{lost}]:" not in line
            ]
            if kept:
                self._lines[name] = kept

    def close(self, dice: random.Random) -> list[Path]:
        encoding = dice.choice(("utf-8", "utf-8", "utf-8", "utf-16", "latin-1"))
        end = dice.choice(("\n", "\n", "\n", "\r\n"))
        paths = []
        for name, content in self._lines.items():
            path = self._folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes((end.join(content) + end).encode(encoding, "replace"))
            paths.append(path)
        dice.shuffle(paths)
        return paths

    def _put(self, name: str, line: str) -> None:
        self._lines.setdefault(name, []).append(line)


def _of_docker(writer: _Writer, rank: int, line: str) -> tuple[str, str]:
    record = {"log": f"[rank{rank}]: {line}\n", "stream": "stderr", "time": "2026-11-02T03:00:01Z"}
    return f"{writer.node(rank)}-json.log", json.dumps(record, ensure_ascii=False).replace(
        ": ", ":", 1
    )


_LAYOUTS: Mapping[str, Callable[[_Writer, int, str], tuple[str, str]]] = {
    "ranks": lambda _, rank, line: ("all.log", f"[rank{rank}]: {line}"),
    "torchrun": lambda _, rank, line: (
        f"node-{rank // RANKS_A_NODE}.log",
        f"[default{rank % RANKS_A_NODE}]:[rank{rank}]: {line}",
    ),
    "srun": lambda _, rank, line: (
        "slurm-4711.out",
        f"{rank // RANKS_A_NODE}: [rank{rank}]: {line}",
    ),
    "tasks": lambda _, rank, line: ("slurm-4711.out", f"{rank:>2}: {line}"),
    "files": lambda _, rank, line: (f"rank-{rank}.log", line),
    "ours": lambda writer, rank, line: ("all.log", f"{writer.node(rank)}:{rank}| {line}"),
    "mpi": lambda _, rank, line: ("mpi.out", f"[1,{rank}]<stderr>:{line}"),
    "pods": lambda _, rank, line: (
        "pods.log",
        f"[pod/llama-worker-{rank // RANKS_A_NODE}/pytorch] [rank{rank}]: {line}",
    ),
    "containers": lambda writer, rank, line: (
        f"{writer.node(rank)}.log",
        f"{writer.time(rank):%Y-%m-%dT%H:%M:%S.%f}789Z stderr F [rank{rank}]: {line}",
    ),
    "ray": lambda _, rank, line: (
        "job-driver.log",
        f"(RayTrainWorker pid={9000 + rank}, ip=10.0.0.{rank // RANKS_A_NODE}) [rank{rank}]: {line}",
    ),
    "docker": _of_docker,
}
_STAMPS: Sequence[Callable[[datetime], str]] = (
    lambda at: f"[{at:%Y-%m-%d %H:%M:%S},{at.microsecond // 1000:03}] ",
    lambda at: f"{at:%Y-%m-%d %H:%M:%S.%f} | INFO | ",
    lambda at: f"I{at:%m%d %H:%M:%S.%f} 4711 train.py:71] ",
    lambda at: f"{at:%Y/%m/%d %H:%M:%S} ",
    lambda at: f"{at:%Y-%m-%dT%H:%M:%S}+00:00 ",
    lambda _: "",
)
_PROGRESS: Sequence[Callable[[int, float], str]] = (
    lambda step, loss: f"step {step} loss {loss:.3f}",
    lambda step, loss: (
        f" iteration {step:8}/ 500000 | consumed samples: {step * 1024:12} | lm loss: {loss:.6E} | "
        "grad norm: 1.2 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    ),
    lambda step, loss: (
        f"{{'loss': {loss:.4f}, 'grad_norm': 1.1, 'learning_rate': 5e-05, 'step': {step}}}"
    ),
    lambda step, loss: "\r".join(
        f"Epoch 0: {part:3}%|{'█' * (part // 9):<10}| {part}/100 [00:{part:02}<01:11, 1.1it/s, "
        f"loss={loss:.2f}, step={step}]"
        for part in range(0, 100, 20)
    ),
    lambda step, loss: (
        f"[INFO] [logging.py:128:log_dist] [Rank 0] step={step}, skipped=0, lr=[1e-05], loss={loss:.3f}"
    ),
)


def write(
    folder: Path, failure_class: str, seed: int, world: int = 64, *, held_out: bool = False
) -> Labelled:
    """Logs of a job in which one rank, node, or the scheduler ends the training, or nothing does."""
    dice = random.Random(f"{failure_class} {seed}")
    writer = _Writer(folder, dice, world)
    culprit = dice.randrange(world)
    for line in dice.sample(FIRST_LINES, 4):
        writer.of_launcher(line)
    writer.of_rank(
        0, f"Namespace({', '.join(f'option_{n}={n}' for n in range(dice.randrange(900)))})"
    )
    _train(writer, dice, world)
    others = [rank for rank in range(world) if rank != culprit]
    dice.shuffle(others)
    rank, node = _fail(writer, dice, failure_class, culprit, others, held_out)
    if failure_class == ONLY_LOST:
        writer.forget_node(culprit)
    return Labelled(failure_class, rank, node, writer.close(dice))


def _fail(
    writer: _Writer,
    dice: random.Random,
    failure_class: str,
    culprit: int,
    others: Sequence[int],
    held_out: bool,
) -> tuple[int | None, str]:
    """Write how it ends; the rank and the node that the lines tell of."""
    if failure_class == HEALTHY:
        writer.of_rank(0, "training is complete, saved /ckpt/final")
        return None, ""
    if failure_class == BEHIND:
        behind = [
            (rank, _timed_out(dice, rank, 417 - (rank == culprit))) for rank in (*others, culprit)
        ]
        _interleave(writer, dice, behind)
        _end(writer, dice, failure_class, culprit)
        return culprit, ""
    early = dice.randrange(4)  # pipes overtake each other
    tellers = [(rank, _lost(writer, dice, rank)) for rank in others[:early]]
    kind, text = _text(dice, failure_class, held_out)
    text = text.replace("2026-11-02T03:11:11", f"{writer.now:%Y-%m-%dT%H:%M:%S}")
    text = text.format(rank=culprit, node=writer.node(culprit), n=dice.randrange(2, 9))
    if kind is RAISED:
        tellers.append((culprit, writer.raised(culprit, text)))
    elif kind is WRITTEN:
        tellers.append((culprit, [text]))
    elif kind is OF_NODES:
        writer.of_kernel(culprit, text)
    elif text:
        writer.of_launcher(text)
    tellers += [(other, _lost(writer, dice, other)) for other in others[early:]]
    _interleave(writer, dice, tellers)
    _end(writer, dice, failure_class, culprit)
    is_of_rank = kind is RAISED or kind is WRITTEN or failure_class == KILLED
    return (culprit if is_of_rank else None), (writer.node(culprit) if kind is OF_NODES else "")


def _text(
    dice: random.Random, failure_class: str, held_out: bool
) -> tuple[Mapping[str, Sequence[str]] | None, str]:
    """A line of the class, and the table that says who writes it."""
    tables = (RAISED, WRITTEN, OF_NODES, OF_SCHEDULERS, OF_LAUNCHERS)
    if held_out:
        writer, text = dice.choice(HELD_OUT[failure_class])
        return tables["RWNSL".index(writer)], text
    texts = [(table, text) for table in tables for text in table.get(failure_class, ())]
    return dice.choice(texts) if texts else (None, "")


def _end(writer: _Writer, dice: random.Random, failure_class: str, culprit: int) -> None:
    """What a launcher writes at the end."""
    code = -9 if failure_class == KILLED else dice.choice((1, 1, -6))
    pid, local = 9000 + culprit, culprit % RANKS_A_NODE
    if failure_class == KILLED:
        kinds = 3
    elif failure_class in RAISED or failure_class in WRITTEN:
        kinds = 4
    else:
        kinds = 0
    stop = f"{pid + 1} closing signal SIGTERM"
    writer.of_launcher(
        f"W1102 03:11:12.000000 4711 torch/distributed/elastic/multiprocessing/api.py:900] Sending process {stop}"
    )
    if not kinds:
        return
    match dice.randrange(kinds):
        case 0:
            writer.of_launcher(
                "E1102 03:11:13.000000 4711 torch/distributed/elastic/multiprocessing/api.py:874] "
                f"failed (exitcode: {code}) local_rank: {local} (pid: {pid}) of binary: /usr/bin/python"
            )
            signal = " (SIGKILL)" if code == -9 else ""
            tail = (
                f"Signal 9 (SIGKILL) received by PID {pid}"
                if code == -9
                else (
                    "To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"
                )
            )
            for line in (
                "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
                "=" * 60,
                "train.py FAILED",
                "-" * 60,
                "Failures:",
                "  <NO_OTHER_FAILURES>",
                "-" * 60,
                "Root Cause (first observed failure):",
                "[0]:",
                "  time      : 2026-11-02_03:11:12",
                f"  host      : {writer.node(culprit)}",
                f"  rank      : {culprit} (local_rank: {local})",
                f"  exitcode  : {code} (pid: {pid}) {signal}",
                "  error_file: <N/A>",
                f"  traceback : {tail}",
                "=" * 60,
            ):
                writer.of_launcher(line)
        case 1:
            ended = "Killed" if code == -9 else "Exited with exit code 1"
            writer.of_launcher(f"srun: error: {writer.node(culprit)}: task {culprit}: {ended}")
            writer.of_launcher("srun: Terminating StepId=4711.0")
            writer.of_launcher(
                f"slurmstepd: error: *** STEP 4711.0 ON {writer.node(0)} CANCELLED AT 2026-11-02T03:11:14 ***"
            )
        case 2:
            how = "exited on signal 9 (Killed)." if code == -9 else "exited on signal 6 (Aborted)."
            writer.of_launcher(
                "Primary job  terminated normally, but 1 process returned\na non-zero exit code. "
                "Per user-direction, the job has been aborted."
            )
            writer.of_launcher(
                f"mpirun noticed that process rank {culprit} with PID {pid} on node "
                f"{writer.node(culprit)} {how}"
            )
        case _:
            writer.of_launcher(
                f"[2026-11-02 03:11:13,879] [INFO] [launch.py:428:sigkill_handler] Killing subprocess {pid}"
            )
            writer.of_launcher(
                "[2026-11-02 03:11:13,885] [ERROR] [launch.py:434:sigkill_handler] ['/usr/bin/python3', '-u', "
                "'main.py', '--local_rank=0'] exits with return code = 1"
            )


def _train(writer: _Writer, dice: random.Random, world: int) -> None:
    outlived = dice.randrange(3) == 0
    for step in range(1, _STEPS + 1):
        writer.now += timedelta(seconds=11)
        for rank in range(world):
            writer.now += timedelta(milliseconds=dice.randrange(3))
            writer.step(rank, step, dice.random() + 1)
            if dice.randrange(20) == 0:
                writer.of_rank(rank, dice.choice(NOISE))
            if outlived and step == 2 and rank == 1:
                for line in writer.raised(rank, "ValueError: bad record 17 skipped"):
                    writer.of_rank(rank, line)


def _lost(writer: _Writer, dice: random.Random, rank: int) -> list[str]:
    """What a rank writes that loses another."""
    if dice.randrange(16) == 0:
        return writer.raised(rank, dice.choice(LOOKALIKES))
    if dice.randrange(8) == 0:
        return [line.format(rank=rank, n=dice.randrange(1, 250)) for line in dice.choice(SLOW)]
    return writer.raised(rank, dice.choice(LOST).format(n=dice.randrange(1, 250)))


def _timed_out(dice: random.Random, rank: int, sequence: int) -> list[str]:
    at = f"E1102 05:20:03.{dice.randrange(10**9):09}"
    return [
        f"[rank{rank}]:[{at} ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective operation timeout: "
        f"WorkNCCL(SeqNum={sequence}, OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for "
        "600020 milliseconds before timing out.",
        f"[rank{rank}]:[{at} ProcessGroupNCCL.cpp:2271] [PG ID 0 PG GUID 0(default_pg) Rank {rank}]  failure detected "
        f"by watchdog at work sequence id: {sequence} PG status: last enqueued work: {sequence}, last completed "
        f"work: {sequence - 1}",
    ]


def _interleave(writer: _Writer, dice: random.Random, tellers: list[tuple[int, list[str]]]) -> None:
    """Lines of ranks that write at the same time, in the order in which the ranks began."""
    waiting, writing = list(tellers), list[tuple[int, list[str]]]()
    while waiting or writing:
        while waiting and len(writing) < 4:
            writing.append(waiting.pop(0))
        rank, rest = dice.choice(writing)
        writer.now += timedelta(milliseconds=dice.randrange(40))
        writer.of_rank(rank, rest.pop(0))
        if not rest:
            writing.remove((rank, rest))
