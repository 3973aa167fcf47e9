"""Files of traces: what is read, and what is refused in one line."""

import gzip
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep_services.straggler.domain.analysis import NothingToCompareError, analyze
from everstep_services.straggler.domain.operations import OperationKind, Place, cause_of, kind_of
from everstep_services.straggler.traces import TraceError, read_traces
from tests.unit.straggler.traces import HEAD, Row, data_parallel, written

LINES = "rank,step,op,start,duration\n"


def parquet_written(path: Path, columns: dict[str, Any]) -> Path:
    arrow = pytest.importorskip("pyarrow", reason="the extra `traces` is not installed")
    from pyarrow import parquet

    parquet.write_table(arrow.table(columns), path)
    return path


def test_all_columns_are_read(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "Rank,step,op,start,duration,group,role,dp_rank,pp_rank,tp_rank,ep_rank,microbatch,"
        "sequence,tokens,node,comment\n"
        "1,5,forward,10,250.5,,decoder,1,0,0,,3,,2048,n1,x\n"
        "0,5,all_reduce,12,1,dp,decoder,0,0,0,,,77,,n0,y\n"
    )
    table = read_traces([path], "ms").table
    assert table.ops == ("forward", "all_reduce")
    assert table.groups == ("dp",)
    assert table.start.tolist() == pytest.approx([0, 0.002])
    assert table.duration.tolist() == pytest.approx([0.2505, 0.001])
    assert table.group.tolist() == [-1, 0]
    assert table.microbatch.tolist() == [3, -1]
    assert table.sequence.tolist() == [-1, 77]
    assert table.tokens is not None
    assert table.tokens[0] == 2048
    assert math.isnan(table.tokens[1])
    assert table.roles == {0: "decoder", 1: "decoder"}
    assert table.hosts == {0: "n0", 1: "n1"}
    assert table.places[1] == Place(data=1, pipeline=0, tensor=0)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "it is empty"),
        ("rank,step,op,start\n", "columns missing: duration; it has rank, step, op, start"),
        ("a;b;c\n1;2;3\n", "columns missing: rank, step, op, start, duration; it has a;b;c"),
        (LINES, "it has no operations"),
        (LINES + "0,1,f,abc,1\n", "line 2: start 'abc' is not a number"),
        (LINES + "0,1,f,1,1\n0,1,f,1\n", "line 3: it has 4 columns instead of 5"),
        (LINES + "0,1,f,1,1\n0,1,f,1,-2\n", "line 3: duration -2 is negative"),
        (LINES + "0,1,f,1,nan\n", "line 2: duration nan is not a number"),
        (LINES + "0,1,f,inf,1\n", "line 2: start inf is not finite"),
        (LINES + "0,1,,1,1\n", "line 2: op is empty"),
        (LINES + "0.5,1,f,1,1\n", "line 2: rank 0.5 is not a whole number"),
        (LINES + "-1,1,f,1,1\n", "line 2: rank -1 is negative"),
        (LINES + "9999999999,1,f,1,1\n", "line 2: rank 9999999999 is above 2147483646"),
        (LINES + "0,,f,1,1\n", "line 2: step nan is not a number"),
        (LINES + "0,1,f,1,1e9\n", "is it in another unit?"),
        (LINES + "0,1,f,1e30,1\n", "line 2: start 1e+30 is not a time: is its unit right?"),
        (LINES + '0,1,"f,1,1\n', "it is not CSV"),
        ("rank,step,op,start,duration,dp,data\n", "columns 'dp' and 'data' are the same, data"),
        ("rank,step,op,start,duration,role\n0,1,f,1,1,a\n0,2,f,1,1,b\n",
         "rank 0 has more than one role: it must stay the same"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_table_is_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(TraceError) as caught:
        read_traces([path])
    assert complaint in str(caught.value)
    assert str(caught.value).startswith(f"{path}: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"\x1f\x8bnot gzip", gzip.compress(b"x" * 9999, mtime=0)[:40], b"PAR1 broken",
     b"\xff\xfe\x00a,b\n1,2\n",
     b"{", b"[1]", b'{"traceEvents": 3}', b"[" * 100_000, b"\x00" * 50],
    ids=range(9),
)  # fmt: skip
def test_broken_files_are_one_line(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "t"
    path.write_bytes(content)
    with pytest.raises(TraceError) as caught:
        read_traces([path])
    assert "\n" not in str(caught.value)


def test_tables_of_several_files_are_one_table(tmp_path: Path) -> None:
    rows = data_parallel(steps=4, ranks=3)
    paths = [written(tmp_path / f"{rank}.csv", [row for row in rows if row[0] == rank])
             for rank in range(3)]  # fmt: skip
    paths[1].with_suffix(".gz").write_bytes(gzip.compress(paths[1].read_bytes()))
    paths[1] = paths[1].with_suffix(".gz")
    one = read_traces([written(tmp_path / "all.csv", rows)]).table
    table = read_traces(paths).table
    assert len(table) == len(rows)
    assert sorted(table.start.tolist()) == pytest.approx(sorted(one.start.tolist()))


@pytest.mark.parametrize(
    ("second", "complaint"),
    [
        ("0,1,f,0.1,3\n", "line 2: rank 0 has step 1 in {a}, line 2, too, with other times"),
        ("1,1,f,9,1\n0,2,f,5,1\n0,3,f,7,1\n",
         "line 3: rank 0 has step 2 in {a}, line 3, too, with other times"),
        ("0,1,f,0,1\n", "line 2: rank 0 has step 1 in {a}, line 2, too, with the same times"),
    ],
)  # fmt: skip
def test_files_that_contradict_each_other_are_one_line(
    tmp_path: Path, second: str, complaint: str
) -> None:
    """Both files and the rows are named."""
    first, other = tmp_path / "a.csv", tmp_path / "b.csv"
    first.write_text(LINES + "0,1,f,0,1\n0,2,f,1,1\n0,3,f,2,1\n")
    other.write_text(LINES + second)
    with pytest.raises(TraceError) as caught:
        read_traces([first, other])
    said = f"{other}: {complaint.format(a=first)}: give each rank and step once"
    assert str(caught.value) == said


def test_a_step_may_be_cut_by_the_end_of_a_file(tmp_path: Path) -> None:
    """Also one whose operations have one name; and files may have other operations of a rank."""
    paths = [tmp_path / "a.csv", tmp_path / "b.csv", tmp_path / "c.csv"]
    paths[0].write_text(LINES + "0,1,f,0,1\n0,2,f,1,1\n")
    paths[1].write_text(LINES + "0,2,f,2,1\n0,3,f,3,1\n")
    paths[2].write_text(LINES + "0,1,all_reduce,0.5,1\n0,2,all_reduce,1.5,1\n")
    assert len(read_traces(paths).table) == 6


def test_parquet_is_read_as_csv_is(tmp_path: Path) -> None:
    rows = data_parallel(steps=4, ranks=3, slow=1)
    columns = dict(zip(HEAD, map(list, zip(*rows, strict=True)), strict=True))
    one = read_traces([written(tmp_path / "t.csv", rows)]).table
    other = read_traces([parquet_written(tmp_path / "t.parquet", columns)]).table
    assert (one.ops, one.groups) == (other.ops, other.groups)
    for name in ("rank", "step", "op", "start", "duration", "group"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"start": ["a"]}, "column start has string, and needs numbers"),
        ({"duration": [None]}, "row 1: duration nan is not a number"),
        ({"op": [None]}, "row 1: op is empty"),
        ({"rank": [-3]}, "row 1: rank -3 is negative"),
        ({"step": [True]}, "column step has bool, and needs numbers"),
    ],
)
def test_what_is_wrong_with_a_parquet_file(
    tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    columns = {"rank": [0], "step": [1], "op": ["f"], "start": [0.0], "duration": [1.0], **change}
    with pytest.raises(TraceError, match=complaint):
        read_traces([parquet_written(tmp_path / "t.parquet", columns)])


def test_without_pyarrow_the_command_says_what_to_install(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(b"PAR1PAR1")
    program = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from everstep_services.cli.__main__ import main\n"
        f"sys.exit(main(['stragglers', 'analyze', {str(path)!r}]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stderr == "everstep: pyarrow is missing: pip install 'everstep[traces]'\n"
    assert (done.returncode, done.stdout) == (1, "")


# ---- nothing crashes


CELLS = st.one_of(
    st.integers(-2, 5).map(str),
    st.floats(allow_nan=True).map(str),
    st.text(max_size=4),
    st.just(""),
)
NAMES = st.sampled_from(
    ["rank", "step", "op", "start", "duration", "group", "microbatch", "pp", "dp", "tokens", "x"]
)


@settings(max_examples=60)
@given(head=st.lists(NAMES, max_size=9, unique=True), rows=st.lists(st.lists(CELLS, max_size=9)))
def test_no_table_crashes(
    tmp_path_factory: pytest.TempPathFactory, head: list[str], rows: list[list[str]]
) -> None:
    path = written(tmp_path_factory.mktemp("any") / "t.csv", rows, head)
    try:
        analyze(read_traces([path]).table)
    except (TraceError, NothingToCompareError) as error:
        assert "\n" not in str(error)


ROWS = st.tuples(
    st.integers(0, 3), st.integers(0, 3),
    st.sampled_from(["forward", "backward", "all_reduce", "send_forward", "recv_forward", "data",
                     "wait", "x"]),
    st.floats(-10, 10), st.floats(0, 5), st.sampled_from(["", "dp", "world"]),
    st.sampled_from(["", "0", "1"]), st.integers(0, 1), st.sampled_from(["", "1", "100"]),
)  # fmt: skip


@settings(max_examples=150)
@given(rows=st.lists(ROWS, min_size=1, max_size=40))
def test_any_operations_give_a_report(
    tmp_path_factory: pytest.TempPathFactory, rows: list[Row]
) -> None:
    """Whatever overlaps, contradicts itself or has no partner."""
    whole = [(*row[:7], row[0] % 2, row[8]) for row in rows]
    head = [*HEAD, "microbatch", "pipeline_rank", "tokens"]
    path = written(tmp_path_factory.mktemp("any") / "t.csv", whole, head)
    try:
        report = analyze(read_traces([path]).table)
    except NothingToCompareError:
        return
    assert report.ranks >= 2
    assert "NaN" not in json.dumps([one.own_s for one in report.rank_rows])


# ---- torch.profiler's


def profiled(rank: int | None = 0, **changes: Any) -> dict[str, Any]:
    """A trace of two steps, as Kineto writes it on a CUDA device."""
    events: list[dict[str, Any]] = []
    for step in range(3):
        at = 1000.0 * step
        events += [
            {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": at,
             "dur": 990,
             "tid": 1},
            {"ph": "X", "cat": "kernel", "name": "gemm", "ts": at + 10, "dur": 300, "tid": 7},
            {"ph": "X", "cat": "kernel", "name": "relu", "ts": at + 320, "dur": 100, "tid": 7},
            {"ph": "X", "cat": "cpu_op", "name": "record_param_comms", "ts": at + 5, "dur": 3,
             "tid": 1, "args": {"Seq": 40 + step, "External id": step}},
            {"ph": "X", "cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
             "ts": at + 430, "dur": 500, "tid": 20,
             "args": {"Collective name": "allreduce", "Process Group Name": "0",
                      "External id": step,
                      "Process Group Description": "default_pg", "Process Group Ranks": "[0, 1]"}},
        ]  # fmt: skip
    about = {} if rank is None else {"distributedInfo": {"rank": rank, "backend": "nccl"}}
    return {"traceEvents": events, "baseTimeNanoseconds": 17 * 10**17, **about, **changes}


def test_kernels_and_nccls_collectives_are_read(tmp_path: Path) -> None:
    paths = []
    for rank in range(2):
        paths.append(tmp_path / f"{rank}.json.gz")
        paths[-1].write_bytes(gzip.compress(json.dumps(profiled(rank, host_name="n1")).encode()))
    table = read_traces(paths).table
    assert set(table.ops) == {"kernels", "nccl:allreduce", "gap"}, "nothing ran between steps"
    assert table.groups == ("default_pg [0, 1]",)
    collective = table.kinds() == OperationKind.COLLECTIVE
    assert sorted(table.sequence[collective].tolist()) == [40, 40, 41, 41, 42, 42]
    assert table.duration[~collective].tolist() == pytest.approx([410e-6] * 6)
    assert table.hosts == {0: "n1", 1: "n1"}


GAPS: dict[str, tuple[list[dict[str, Any]], str, str]] = {
    "data loader": (
        [{"cat": "user_annotation", "name": "enumerate(DataLoader)#_Iter.__next__", "dur": 480},
         {"cat": "cpu_op", "name": "aten::stack", "dur": 400}],
        "gap: dataloader", "input",
    ),
    "synchronisation": (
        [{"cat": "cpu_op", "name": "aten::item", "dur": 470},
         {"cat": "cuda_runtime", "name": "cudaStreamSynchronize", "dur": 450}],
        "gap: cudaStreamSynchronize", "host",
    ),
    "python": ([{"cat": "python_function", "name": "train.py(7): log", "dur": 490}],
               "gap: train.py(7): log", "host"),
    "nothing": ([{"cat": "cpu_op", "name": "aten::add", "dur": 100}], "gap", "host"),
}  # fmt: skip


@pytest.mark.parametrize("what", GAPS)
def test_the_time_between_operations_is_named_by_what_the_profiler_shows(
    what: str, tmp_path: Path
) -> None:
    """Rank 2 leaves its device idle for 0.5 ms of each step; that is not the next kernel's."""
    shown, name, cause = GAPS[what]
    paths = []
    for rank in range(4):
        events = []
        for step in range(20):
            at, idle = 1440.0 * step, 500.0 * (rank == 2)
            rows: list[dict[str, Any]] = [
                {"cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": at, "dur": 1440},
                {"cat": "kernel", "name": "gemm", "ts": at + 10 + step % 3, "dur": 300, "tid": 7},
                {"cat": "kernel", "name": "relu", "ts": at + 320 + idle, "dur": 300, "tid": 7},
                {"cat": "kernel", "name": "ncclDevKernel_AllReduce_Sum_f32_RING_LL(x)",
                 "ts": at + 630 + idle, "dur": 800 - idle, "tid": 20},
            ]  # fmt: skip
            if rank == 2:
                rows += [{"ts": at + 320, "tid": 1, **one} for one in shown]
            events += [{"ph": "X", "tid": 1, **one} for one in rows]
        paths.append(tmp_path / f"rank{rank}.json")
        paths[-1].write_text(json.dumps({"traceEvents": events}))
    report = analyze(read_traces(paths).table)
    (found,) = report.findings
    assert (found.ranks, found.cause) == ((2,), cause)
    (gap,) = (one for one in report.operations if one.kind == "gap")
    assert gap.name == name
    assert gap.own_s == pytest.approx(500e-6 / 4, rel=0.1), "a step and rank, in the mean"
    others = [one.own_s for one in report.operations if one.kind == "compute"]
    assert sum(others) == pytest.approx(600e-6, rel=0.1)


def test_clocks_of_files_with_different_bases_fit(tmp_path: Path) -> None:
    paths = [tmp_path / "0.json", tmp_path / "1.json"]
    paths[0].write_text(json.dumps(profiled(0)))
    paths[1].write_text(json.dumps(profiled(1, baseTimeNanoseconds=17 * 10**17 + 2_000_000_000)))
    table = read_traces(paths).table
    starts = [table.start[table.rank == rank].min() for rank in range(2)]
    assert starts[1] - starts[0] == pytest.approx(2)


@pytest.mark.parametrize(
    ("name", "content", "complaint"),
    [
        ("a.json", profiled(None), "its rank is missing (distributedInfo)"),
        ("a.json", [], "it holds no events"),
        ("rank7.json", {"traceEvents": []}, "it holds no events"),
        ("rank7.json", {"traceEvents": [{}]}, "it has no steps: call the profiler's step()"),
        ("a.json", profiled(-1), "its rank is -1"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_profilers_trace(
    tmp_path: Path, name: str, content: object, complaint: str
) -> None:
    path = tmp_path / name
    path.write_text(json.dumps(content))
    with pytest.raises(TraceError) as caught:
        read_traces([path])
    assert complaint in str(caught.value)


def test_a_rank_has_one_file(tmp_path: Path) -> None:
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path in paths:
        path.write_text(json.dumps(profiled(3)))
    with pytest.raises(TraceError, match=r"b.json: rank 3 is that of .*a.json, too"):
        read_traces(paths)


def test_tables_and_profilers_traces_are_not_mixed(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(profiled()))
    with pytest.raises(TraceError, match="cannot be mixed"):
        read_traces([path, written(tmp_path / "t.csv", data_parallel())])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)
EVENTS = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "ph": st.just("X") | JSON,
            "name": st.sampled_from(["ProfilerStep#1", "ProfilerStep#2", "gloo:all_reduce",
                                     "aten::mm", "ncclDevKernel", "record_param_comms"]) | JSON,
            "cat": st.sampled_from(["cpu_op", "user_annotation", "kernel"]) | JSON,
            "ts": st.floats(0, 1e6) | JSON,
            "dur": st.floats(0, 1e6) | JSON,
            "tid": st.integers(0, 3) | JSON,
            "args": JSON,
        },
    ),
    max_size=15,
)  # fmt: skip


@settings(max_examples=150)
@given(events=EVENTS, about=JSON, base=JSON)
def test_no_profilers_trace_crashes(
    tmp_path_factory: pytest.TempPathFactory, events: list[Any], about: object, base: object
) -> None:
    folder = tmp_path_factory.mktemp("any")
    paths = [folder / "rank0.json", folder / "rank1.json"]
    content = {"traceEvents": events, "baseTimeNanoseconds": base}
    paths[0].write_text(json.dumps({**content, "distributedInfo": about}))
    paths[1].write_text(json.dumps(content))
    try:
        analyze(read_traces(paths).table)
    except (TraceError, NothingToCompareError) as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("forward", OperationKind.COMPUTE),
        ("backward-step", OperationKind.COMPUTE),
        ("optimizer", OperationKind.COMPUTE),
        ("all_reduce", OperationKind.COLLECTIVE),
        ("ReduceScatter", OperationKind.COLLECTIVE),
        ("nccl:all_gather", OperationKind.COLLECTIVE),
        ("gloo:broadcast", OperationKind.COLLECTIVE),
        ("send_forward", OperationKind.SEND),
        ("isend", OperationKind.SEND),
        ("recvBackward", OperationKind.RECEIVE),
        ("recv_forward", OperationKind.RECEIVE),
        ("bubble", OperationKind.WAIT),
        ("aten::gather", OperationKind.COMPUTE),
        ("prefetch", OperationKind.COMPUTE),
    ],
)
def test_what_an_operation_is_by_its_name(name: str, kind: OperationKind) -> None:
    assert kind_of(name) == kind


@pytest.mark.parametrize(
    ("name", "cause"),
    [("data", "input"), ("DataLoader", "input"), ("load_batch", "input"), ("gc", "host"),
     ("checkpoint", "host"), ("forward", "compute"), ("database", "compute")],
)  # fmt: skip
def test_what_is_slow_by_the_name_of_an_operation(name: str, cause: str) -> None:
    assert cause_of(name) == cause
