"""Logs of NCCL's Inspector, in the formats that its documentation and releases show."""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep_services.straggler.domain.analysis import analyze
from everstep_services.straggler.traces import TraceError, read_traces
from everstep_services.straggler.traces.inspector import period_of

WORLD, PAIR = "0xe62dedaa97644a", "0x51d0"
RANKS, SLOW, STEPS = 8, 5, 24
BUCKETS = (33_554_432, 33_554_432, 4096)


def context(rank: int, group: str = WORLD, size: int = RANKS, form: str = "v4.0") -> dict[str, Any]:
    return {
        "header": {"id": group, "rank": rank, "n_ranks": size, "nnodes": 2},
        "metadata": {
            "inspector_output_format_version": form, "git_rev": "",
            "rec_mechanism": "nccl_profiler_interface", "dump_timestamp_us": 1752867229276385,
            "hostname": f"host-{rank // 4}", "pid": 4000 + rank,
        },
    }  # fmt: skip


def collective(number: int, size: int, start: float, took: float, name: str = "AllReduce") -> Any:
    channels = [
        {"channel_id": it, "kernel_start_ts": int(start) + it, "kernel_stop_ts": int(start + took)}
        for it in range(2)
    ]
    return {
        "coll": name, "coll_sn": number, "coll_msg_size_bytes": size,
        "coll_exec_time_us": int(took), "coll_timing_source": "kernel_gpu",
        "coll_algobw_gbs": 418.4, "coll_busbw_gbs": 366.1,
        "event_trace_ts": {"coll_start_ts": int(start) - 90, "coll_stop_ts": int(start) - 80,
                           "kernel_events": channels},
    }  # fmt: skip


def training(slow: int | None = SLOW) -> Iterator[tuple[int, Any]]:
    """Two broadcasts, then steps of three buckets; a rank computes 30 % longer for each."""
    chance, at, number = random.Random(7), 1.75e15, 0
    for size in (77, 99_000):
        number += 1
        for rank in range(RANKS):
            yield rank, collective(number, size, at, 400, "Broadcast")
        at += 1000
    for _ in range(STEPS):
        for size in BUCKETS:
            number += 1
            own = [20_000 * (1.3 if it == slow else 1) + chance.gauss(0, 60) for it in range(RANKS)]
            end = at + max(own) + 2000
            for rank in range(RANKS):
                yield rank, collective(number, size, at + own[rank], end - at - own[rank])
            at = end


def logged(folder: Path, form: str = "v4.0", slow: int | None = SLOW) -> list[Path]:
    lines: dict[int, list[Any]] = {rank: [] for rank in range(RANKS)}
    for rank, call in training(slow):
        lines[rank].append({"coll_perf": call})
    paths = []
    for rank, payloads in lines.items():
        known = context(rank, form=form)
        if form == "v4.3":  # the context of a dump, then its records
            dump = {**known, "dump_stats": {"coll_records": len(payloads), "p2p_records": 0}}
            whole = [dump, *payloads]
        else:
            whole = [{**known, **payload} for payload in payloads]
        paths.append(folder / f"host-{rank // 4}-pid{4000 + rank}.log")
        paths[-1].write_text("".join(f"{json.dumps(it)}\n" for it in whole))
    return paths


@pytest.mark.parametrize("form", ["v4.0", "v4.2", "v4.3"])
def test_the_rank_that_enters_late_is_named(tmp_path: Path, form: str) -> None:
    read = read_traces(logged(tmp_path, form))
    assert read.notes == ()
    assert {int(it) for it in read.table.rank} == set(range(RANKS))
    assert len(set(read.table.step.tolist())) == STEPS
    assert read.table.hosts[SLOW] == "host-1"
    report = analyze(read.table)
    (finding,) = report.findings
    assert finding.ranks == (SLOW,)
    assert finding.price_ratio == pytest.approx(28 / 22 - 1, rel=0.05)


def test_nobody_is_named_where_all_take_as_long(tmp_path: Path) -> None:
    assert not analyze(read_traces(logged(tmp_path, slow=None)).table).findings


def test_transfers_are_matched_by_their_ends(tmp_path: Path) -> None:
    """Of three ranks, 0 sends to 1, and 1 to 2; each knows the other by its rank in the pair."""
    paths = []
    for rank in range(3):
        lines = []
        for step in range(4):
            at = 1.75e15 + step * 1e6
            lines.append({**context(rank, size=3), "coll_perf": collective(step + 1, 64, at, 50)})
            for name, peer in (("Send", rank + 1), ("Recv", rank - 1)):
                if 0 <= peer < 3:
                    times = {"kernel_events": [{"channel_id": 0, "kernel_start_ts": int(at) + 500}]}
                    transfer = {"p2p": name, "p2p_sn": step, "p2p_peer": peer,
                                "p2p_msg_size_bytes": 1024, "p2p_exec_time_us": 9,
                                "event_trace_ts": times}  # fmt: skip
                    lines.append({**context(rank, size=3), "p2p_perf": transfer})
        paths.append(tmp_path / f"{rank}.log")
        paths[-1].write_text("".join(f"{json.dumps(it)}\n" for it in lines))
    table = read_traces(paths).table
    assert set(table.groups) == {WORLD, f"{WORLD} 0 to 1", f"{WORLD} 1 to 2"}
    assert set(table.ops) == {"nccl:allreduce", "send", "recv", "time between calls"}


def changed(folder: Path, change: str) -> list[Path]:
    paths = logged(folder)
    lines = paths[0].read_text().splitlines(keepends=True)
    entry = json.loads(lines[1])
    match change:
        case "silent":
            del entry["coll_perf"]["event_trace_ts"]
            paths[0].write_text(json.dumps(entry))
        case "cut":
            paths[0].write_text("".join(lines) + lines[-1][:200])
        case "wrong":
            paths[0].write_text(lines[0] + '{"coll_perf": 3}\n')
        case "twice":
            paths.append(folder / "copy.log")
            paths[-1].write_text(paths[0].read_text())
        case _:
            paths.append(folder / "table.csv")
            paths[-1].write_text("rank,step,op,start,duration\n0,1,forward,1,1\n")
    return paths


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("silent", "line 1: it has no times; log with NCCL_INSPECTOR_DUMP_VERBOSE=1"),
        ("wrong", "line 2: not of NCCL's Inspector"),
        ("twice", "process 4000 of host-0 has"),
        ("mixed", "logs of NCCL's Inspector and tables cannot be mixed"),
    ],
)
def test_what_cannot_be_used_is_refused(tmp_path: Path, change: str, complaint: str) -> None:
    with pytest.raises(TraceError, match=complaint):
        read_traces(changed(tmp_path, change))


def test_a_killed_process_costs_its_last_line(tmp_path: Path) -> None:
    read = read_traces(changed(tmp_path, "cut"))
    (note,) = read.notes
    assert "which is left out" in note
    assert [finding.ranks for finding in analyze(read.table).findings] == [(SLOW,)]


@pytest.mark.parametrize(
    ("sizes", "period"),
    [([5] * 9, 1), ([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2, 3], 3), (list(range(40)), 1), ([4], 1)],
)
def test_a_step_is_what_repeats(sizes: list[int], period: int) -> None:
    assert period_of(sizes) == period
