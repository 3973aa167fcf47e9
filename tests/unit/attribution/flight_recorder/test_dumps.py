"""Dumps of every shape: formats, torn ones, hostile ones. Nothing in them runs, nothing raises."""

import contextlib
import copy
import gc
import json
import os
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep_services.attribution.flight_recorder import dump as reading
from everstep_services.attribution.flight_recorder.analysis import FlightAnalysis
from everstep_services.attribution.flight_recorder.dump import read_dump
from everstep_services.attribution.flight_recorder.dump_file import (
    BadDumpError,
    NotDataError,
    load_data,
)
from everstep_services.attribution.flight_recorder.folder import (
    DumpFile,
    NoDumpsError,
    find_dumps,
    read_dumps,
)
from everstep_services.attribution.flight_recorder.summary import RankSummary, UnreadableDump
from tests.fakes import flight_dumps as fake


def _dumps() -> dict[int, dict[str, Any]]:
    groups = fake.three_dimensions(2, 2, 1)
    job = fake.steady(groups, 4, 3)
    fake.leave(job, 3, 5)
    return fake.play(job)


class _Runs:
    """What a hostile pickle asks for."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[str, ...]]:
        return open, (str(self._path), "w")


def test_pickle_and_json_say_the_same() -> None:
    """Both formats, with every pickle protocol (A7.1)."""
    dump = _dumps()[0]
    by_json = read_dump(json.dumps(dump).encode(), 0)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert read_dump(pickle.dumps(dump, protocol=protocol), 0) == by_json


def test_a_pickle_that_wants_to_run_something_does_not(tmp_path: Path) -> None:
    """A pickle that imports is refused with every protocol (A7.3)."""
    proof = tmp_path / "it-ran"
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        hostile = pickle.dumps({"entries": [], "version": _Runs(proof)}, protocol=protocol)
        with pytest.raises(BadDumpError, match="wants to import"):
            read_dump(hostile, 0)
    assert not proof.exists()


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"\x80\x02}q\x00(X\x07\x00\x00\x00entriesq\x01]q\x02}b.",  # a state for a dictionary
        b"\x80\x04\x82\x01.",  # an extension code
        b"\x80\x02P1\n.",
        b"\x80\x02X\x01\x00\x00\x00aQ.",  # a persistent id
        b"\x80\x02(ios\nsystem\n.",
        b"",
        b"no pickle at all",
    ],
)
def test_everything_but_data_is_refused(content: bytes) -> None:
    """Whatever is more than plain data (A7.3)."""
    with pytest.raises(NotDataError):
        load_data(content)


@given(st.binary(max_size=300))
def test_no_bytes_raise_anything_else(content: bytes) -> None:
    """A7.1: the parser never raises."""
    for start in (b"", b"{", b"[", b"\x80\x02"):
        with contextlib.suppress(BadDumpError):
            read_dump(start + content, 0)


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
_FIELDS = sorted(_dumps()[0]["entries"][0])


@given(
    st.dictionaries(st.sampled_from(_FIELDS), _JUNK, max_size=6),
    st.dictionaries(
        st.sampled_from(["pg_config", "pg_status", "version", "entries"]), _JUNK, max_size=2
    ),
)
def test_no_value_of_a_field_raises(fields: dict[str, Any], head: dict[str, Any]) -> None:
    """A7.1: and whatever a field holds, the other entries still count."""
    dump = _dumps()[0]
    dump["entries"][2] |= fields
    for content in (pickle.dumps(dump | head), pickle.dumps(dump)):
        try:
            summary = read_dump(content, 0)
        except BadDumpError:
            assert head
        else:
            assert summary.rank == 0


def test_every_prefix_of_a_dump_is_read_or_refused() -> None:
    """A7.1: a file that is cut off gives its whole entries, with a note."""
    content = json.dumps(_dumps()[0]).encode()
    read = 0
    for length in range(0, len(content), 97):
        try:
            summary = read_dump(content[:length], 0)
        except BadDumpError:
            continue
        read += 1
        assert "it is cut off" in summary.problems[0]
    assert read > 10


def test_the_oldest_formats_are_read() -> None:
    """A7.1: a bare list of entries; sequence numbers under their old name; numbers as text."""
    entries = [
        {"seq_id": str(number), "pg_name": "0", "profiling_name": "nccl:all_reduce",
         "state": "completed", "time_created_ns": str(number)}
        for number in (1, 2)
    ]  # fmt: skip
    summary = read_dump(json.dumps(entries).encode(), 0)
    assert [(one.name, one.enqueued) for one in summary.groups] == [("0", 2)]
    assert any("no version" in problem for problem in summary.problems)


def test_an_unknown_version_is_said_and_read_all_the_same() -> None:
    """A version of the future (A7.1)."""
    summary = read_dump(json.dumps(_dumps()[0] | {"version": "7.1"}).encode(), 0)
    assert summary.groups
    assert any("7.1" in problem for problem in summary.problems)


def test_entries_that_say_of_no_operation_are_left_out() -> None:
    """A7.1: taken for collectives, they would pass for calls that the other ranks do not make."""
    dump = _dumps()[0]
    whole = read_dump(json.dumps(dump).encode(), 0)
    dump["entries"] += [{}, {"record_id": 99, "state": "scheduled"}]
    summary = read_dump(json.dumps(dump).encode(), 0)
    assert summary.groups == whole.groups
    assert "2 entries without an operation were left out" in summary.problems


def test_a_timeout_that_is_recorded_as_completed_still_counts_as_pending() -> None:
    dump = _dumps()[0]
    entry = dump["entries"][-1]
    entry |= {"state": "completed", "retired": True, "time_discovered_started_ns": fake.START_NS,
              "time_discovered_completed_ns": fake.START_NS + 600_000_000_000}  # fmt: skip
    dump["pg_status"] = {}
    group = read_dump(json.dumps(dump).encode(), 0).groups
    assert any(one.pending for one in group)


def test_files_are_found_by_the_rank_in_their_names(tmp_path: Path) -> None:
    for name in ("nccl_trace_rank_0", "nccl_trace_rank_12", "readme.txt"):
        (tmp_path / name).write_text("x")
    assert [one.rank for one in find_dumps(tmp_path).files] == [0, 12]
    (tmp_path / "other_3").write_text("x")
    with pytest.raises(NoDumpsError, match="several prefixes"):
        find_dumps(tmp_path)
    assert [one.rank for one in find_dumps(tmp_path, "other_").files] == [3]
    with pytest.raises(NoDumpsError, match="is not a folder"):
        find_dumps(tmp_path / "nothing")
    with pytest.raises(NoDumpsError, match="no file in"):
        find_dumps(tmp_path, "absent_")


def test_the_name_of_a_host_may_stand_before_the_prefix(tmp_path: Path) -> None:
    """A7.1: odd names."""
    for name in ("node-a_nccl_trace_rank_0", "b1_nccl_trace_rank_1"):
        (tmp_path / name).write_text("x")
    assert [one.rank for one in find_dumps(tmp_path).files] == [1, 0]
    assert len(find_dumps(tmp_path, "nccl_trace_rank_").files) == 2
    (tmp_path / "c_nccl_trace_rank_1").write_text("x")  # of another job: who is rank 1?
    with pytest.raises(NoDumpsError, match="several prefixes"):
        find_dumps(tmp_path)


def test_of_two_dumps_of_a_rank_the_newer_one_counts(tmp_path: Path) -> None:
    """A7.1: the answer does not depend on which file is read first."""
    for name, age_s in (("_dump_1", 20), ("_dump_01", 10), ("_dump_0", 30)):
        (tmp_path / name).write_text("x")
        os.utime(tmp_path / name, (1_000_000 - age_s, 1_000_000 - age_s))
    files, left_out = find_dumps(tmp_path)
    assert sorted(file.path.name for file in files) == ["_dump_0", "_dump_01"]
    (older,) = left_out
    assert (older.name, older.rank) == ("_dump_1", None)
    assert older.reason == "_dump_01 is of rank 1, too, and is newer"


def test_what_is_named_as_a_dump_and_is_no_file_is_left_out_with_a_reason(tmp_path: Path) -> None:
    """A7.2: a link to nothing says nothing about its rank."""
    (tmp_path / "_dump_0").write_text("x")
    (tmp_path / "_dump_1").mkdir()
    (tmp_path / "_dump_2").symlink_to("nowhere")
    (tmp_path / "_dump_3").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "_dump_4")
    (tmp_path / "node_5").mkdir()  # a node's folder is not a dump
    files, left_out = find_dumps(tmp_path)
    assert [file.rank for file in files] == [0]
    assert {(one.rank, one.reason) for one in left_out} == {
        (1, "it is not a plain file"),
        (2, "it is a link to nothing"),
        (3, "it is not a plain file"),
        (4, "it is not a plain file"),
    }
    assert not any(one.is_evidence for one in left_out)


def test_a_line_break_in_a_field_forges_no_line() -> None:
    """A13.3"""
    dump = _dumps()[0]
    for entry in dump["entries"]:
        entry["profiling_name"] = "nccl:all_reduce\x1b[31m\n\nrank 0 is guilty"
    texts = [text for _, text in read_dump(json.dumps(dump).encode(), 0).texts]
    assert texts
    assert all(text.isprintable() for text in texts)


@pytest.mark.parametrize(
    "content",
    [
        b'{"version": "2.10", "entries": [1, 2]}',
        b'{"version": "2.10", "entries": [{}]}',
        b'{"version": "99.9", "entries": []}',
        b'{"version": "2.10", "entries": [{"profiling_name": "nccl:all_reduce", "state": "compl',
    ],
)
def test_a_dump_that_is_not_read_to_its_end_does_not_prove_health(content: bytes) -> None:
    """A7.2: exit code 0 means that nothing is wrong, not that nothing could be read."""
    analysis = FlightAnalysis()
    try:
        analysis.add(read_dump(content, 0))
    except BadDumpError as error:
        analysis.add(UnreadableDump(name="_dump_0", reason=str(error), rank=0))
    report = analysis.report()
    assert report.verdict == "inconclusive"
    told = "the dumps of rank 0 cannot be read to their end", "rank 0 left no readable dump"
    assert report.summary.endswith(told)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_text_with_a_byte_order_mark_is_read(encoding: str) -> None:
    """A7.1: JSON that an editor or a shell of Windows wrote."""
    text = json.dumps(_dumps()[0])
    assert read_dump(text.encode(encoding), 0) == read_dump(text.encode(), 0)


def test_text_that_is_not_unicode_is_read_as_far_as_it_goes() -> None:
    """A13.3"""
    summary = read_dump(b'{"version": "2.4", "comm_lib_version": "\xff\xfe", "entries": []}', 0)
    assert any("it is not Unicode" in problem for problem in summary.problems)


@pytest.mark.variant
def test_a_dump_that_takes_too_long_ends_its_reader_and_nothing_else(tmp_path: Path) -> None:
    """A7.3: numbers that all have the same hash take a dictionary hours."""
    fake.write(_dumps(), tmp_path)
    same = b"".join(
        b"\x8a\x0a" + (n * (2**61 - 1)).to_bytes(10, "little") + b"N" for n in range(1, 60_000)
    )
    (tmp_path / "_dump_3.json").write_bytes(b"\x80\x02}(" + same + b"u.")
    read = list(read_dumps(find_dumps(tmp_path).files, readers=1, cpu_s=1))
    assert sorted(one.rank for one in read if isinstance(one, RankSummary)) == [0, 1, 2]
    (late,) = (one for one in read if isinstance(one, UnreadableDump))
    assert "1 s of a processor" in late.reason


def _bomb() -> bytes:
    """A few bytes for which the unpickler wants tens of gigabytes."""
    return b"\x80\x02]r\xff\xff\xff\x7f."


_DEEP = b"\x80\x04}N" + b"\x85" * 200_000 + b"Ns."
"""Tuples in tuples as a key, whose hash needs more than the stack of a thread."""


@pytest.mark.parametrize("content", [_bomb(), _DEEP], ids=["memory", "depth"])
def test_a_bomb_ends_its_reader_and_nothing_else(tmp_path: Path, content: bytes) -> None:
    """A7.3: limits on memory hold, and the other dumps are read (A13.3)."""
    fake.write(_dumps(), tmp_path)
    (tmp_path / "_dump_3.json").write_bytes(content)
    (tmp_path / "_dump_9.json").touch()
    read = list(read_dumps(find_dumps(tmp_path).files, memory_bytes=1 << 30))
    assert sorted(one.rank for one in read if isinstance(one, RankSummary)) == [0, 1, 2]
    unreadable = {one.rank: one.reason for one in read if isinstance(one, UnreadableDump)}
    assert set(unreadable) == {3, 9}
    assert unreadable[9] == "it is empty"


def test_readers_import_nothing_from_the_present_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever looks at the dumps of others stands in a folder of others."""
    fake.write(_dumps(), tmp_path)
    for module in ("multiprocessing", "msgspec", "runpy", "signal", "struct"):
        (tmp_path / f"{module}.py").write_text(f"open('ran-{module}', 'w')\nraise SystemExit(1)\n")
    monkeypatch.chdir(tmp_path)
    read = list(read_dumps(find_dumps(tmp_path).files))
    assert [one.rank for one in read if isinstance(one, RankSummary)] == [0, 1, 2, 3]
    assert list(tmp_path.glob("ran-*")) == []


def test_a_reader_that_fails_by_itself_blames_no_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "_dump_0.json").write_text("{}")
    (tmp_path / "msgspec.py").write_text("raise RuntimeError('half installed')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (read,) = read_dumps(find_dumps(tmp_path).files)
    assert isinstance(read, UnreadableDump)
    assert read.reason == "its reader failed: RuntimeError: half installed"


def test_a_file_that_vanishes_is_left_out(tmp_path: Path) -> None:
    fake.write(_dumps(), tmp_path)
    files = [*find_dumps(tmp_path).files, DumpFile(tmp_path / "_dump_7.json", 7)]
    assert [one.rank for one in read_dumps(files) if isinstance(one, UnreadableDump)] == [7]


_LONG = fake.lengthened(_dumps()[3], 3, 4)
_FIELDS = sorted({*_LONG["entries"][0], "pg_name", "seq_id"})
_VALUES: tuple[Any, ...] = (
    None, -1, 0, 1, 7, 2**62, 2**70, 1.5, "5", "x", True, "scheduled", "started", "completed",
    [], [[2, 3]], ["0", "default_pg"], "nccl:all_reduce", "nccl:send 0->1",
    "nccl:all_reduce_coalesced", "gloo:all_reduce",
)  # fmt: skip
_CHANGES = st.lists(
    st.tuples(
        st.integers(0, len(_LONG["entries"]) - 1),
        st.sampled_from(_FIELDS),
        st.one_of(st.sampled_from(_VALUES), st.just("removed")),
    ),
    max_size=8,
)


@given(_CHANGES)
def test_the_fast_way_reads_what_the_slow_way_reads(changes: list[tuple[int, str, Any]]) -> None:
    """Usual entries are taken by a way of their own, whatever stands between them."""
    dump = copy.deepcopy(_LONG)
    for number, field, value in changes:
        if value == "removed":
            dump["entries"][number].pop(field, None)
        else:
            dump["entries"][number][field] = value
    content = pickle.dumps(dump)
    fast = read_dump(content, 3)
    with mock.patch.object(reading._Reader, "_take_usual", return_value=False):
        assert read_dump(content, 3) == fast


def test_most_entries_are_read_the_fast_way() -> None:
    taken: list[Any] = []
    take = reading._Reader.take

    def counted(self: reading._Reader, entry: Any) -> None:
        taken.append(entry)
        take(self, entry)

    with mock.patch.object(reading._Reader, "take", counted):
        read_dump(pickle.dumps(fake.lengthened(_dumps()[3], 3, 100)), 3)
    assert len(taken) < 10


def test_nothing_is_left_of_a_dump_that_was_read() -> None:
    """Readers look for no circles: one for each dump would take all memory with many ranks."""
    content = pickle.dumps(_LONG)
    gc.collect()
    gc.disable()
    try:
        read_dump(content, 3)
        assert gc.collect() == 0
    finally:
        gc.enable()
