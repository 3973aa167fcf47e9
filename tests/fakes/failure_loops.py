"""Logs of trainings that fail again and again, with other digits in each turn."""

import random
import re
from collections.abc import Iterator, Sequence

ALL = re.compile(r"0x[0-9a-f]{5,}\b|\d+")
OF_TURNS = re.compile(r"0x[0-9a-f]{5,}\b|(?<![A-Za-z_\d])(?<![Rr]ank )(?<!cuda:)\d+")
"""The numbers that turns of a loop differ in: those of ranks, devices and hosts stay."""
_CRASH = """\
I1102 03:11:0{digit}.123456 {pid} train.py:71] start of process {pid} on node-3
[rank3]: Traceback (most recent call last):
[rank3]:   File "/home/u/train.py", line 88, in <module>
[rank3]:     main()
[rank3]:   File "/home/u/train.py", line 61, in main
[rank3]:     loss = step(batch)
[rank3]:   File "/usr/lib/python3.12/site-packages/torch/nn/modules/module.py", line 1751, in _call_impl
[rank3]:     return forward_call(*args, **kwargs)
[rank3]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.{pid} GiB. GPU 3 has a total capacity of \
79.15 GiB of which 1.{step} GiB is free. Process {pid} has 77.9{digit} GiB memory in use.
[rank{rank}]:[E1102 03:11:1{digit}.{step}789 ProcessGroupNCCL.cpp:632] [Rank {rank}] Watchdog caught collective \
operation timeout: WorkNCCL(SeqNum={step}, OpType=ALLREDUCE, NumelIn=8, NumelOut=8, Timeout(ms)=600000) ran for 6000{digit} \
milliseconds before timing out.
[rank{rank}]: terminate called after throwing an instance of 'c10::DistBackendError'
[rank{rank}]:   what():  [PG ID 0 PG GUID 0(default_pg) Rank {rank}] Process group watchdog thread terminated with \
exception: CUDA error: unspecified launch failure
[rank{rank}]: frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f{address}d87 in /lib/libc10.so)
[rank{rank}]: frame #1: c10::detail::torchCheckFail(char const*) + 0x64 (0x7f{address}75f in /lib/libc10.so)
[rank{rank}]: frame #2: c10d::ProcessGroupNCCL::ncclCommWatchdog() + 0x14d (0x7f{address}a1d in /lib/libtorch_cuda.so)
W1102 03:11:12.{step}000 {pid} torch/distributed/elastic/multiprocessing/api.py:900] Sending process {pid} closing \
signal SIGTERM
E1102 03:11:13.{step}000 {pid} torch/distributed/elastic/multiprocessing/api.py:874] failed (exitcode: 1) local_rank: 3 \
(pid: {pid}) of binary: /usr/bin/python
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-02_03:11:1{digit}
  host      : node-3
  rank      : {rank} (local_rank: {rank})
  exitcode  : -6 (pid: {other_pid})
  error_file: <N/A>
  traceback : Signal 6 (SIGABRT) received by PID {other_pid}
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-02_03:11:1{digit}
  host      : node-3
  rank      : 3 (local_rank: 3)
  exitcode  : 1 (pid: {pid})
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""


def crashes() -> Iterator[str]:
    """A rank without memory and the others that lose it, again and again."""
    dice = random.Random(3)
    while True:
        rank, pid = dice.choice((0, 1, 2, 4, 5, 6, 7)), dice.randrange(900, 4_000_000)
        yield _CRASH.format(
            rank=rank, pid=pid, other_pid=pid + 1 + dice.randrange(9), step=dice.randrange(100, 200_000), digit=dice.randrange(10),
            address=f"{dice.randrange(16**6):06x}",
        )  # fmt: skip


def with_other_digits(
    text: str, dice: random.Random, share: float = 1.0, numbers: re.Pattern[str] = OF_TURNS
) -> str:
    """The text with other digits in a share of its numbers, a few of them longer or shorter."""

    def another(number: re.Match[str]) -> str:
        if dice.random() >= share:
            return number[0]
        if number[0].startswith("0x"):
            return f"0x{dice.randrange(16 ** (len(number[0]) - 2)):x}"
        length = len(number[0]) + (dice.randrange(40) == 0) - (dice.randrange(40) == 0)
        return "".join(dice.choices("0123456789", k=max(1, length)))

    return numbers.sub(another, text)


def loop(
    texts: Sequence[str],
    turns: int,
    dice: random.Random,
    share: float = 1.0,
    numbers: re.Pattern[str] = OF_TURNS,
) -> str:
    """Failures in turns, in another order and with other digits in each."""
    order, parts = list(texts), list[str]()
    for _ in range(turns):
        dice.shuffle(order)
        parts += [with_other_digits(text, dice, share, numbers) for text in order]
    return "".join(parts)
