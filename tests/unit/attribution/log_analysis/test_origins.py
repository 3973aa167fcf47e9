"""Whose line it is, and the name of a failure without its numbers."""

from pathlib import Path

import pytest

from everstep_services.attribution.log_analysis import fingerprint
from everstep_services.attribution.log_analysis.origins import of_file, of_line


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
