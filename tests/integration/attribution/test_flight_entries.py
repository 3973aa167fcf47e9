"""Entries of dumps, printed as torch's own analyzer prints them."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.flight_recorder import fr_trace
from torch.distributed.flight_recorder.components import utils

from everstep_services.cli.__main__ import main
from tests.fakes import flight_dumps as fake


def write_dumps(folder: Path, *, transfers: bool = False) -> None:
    groups = fake.three_dimensions(2, 2, 1)
    job = fake.steady(groups, 4, 3)
    if transfers:
        whole = groups[0]
        job.calls[0].insert(2, fake.Call(whole, "send", peer=3))
        job.calls[3].insert(2, fake.Call(whole, "recv", peer=0))
    fake.leave(job, 1, 5)
    for rank, dump in fake.play(job).items():
        for entry in dump["entries"]:
            entry["frames"] = [{"name": "step", "filename": "train.py", "line": rank}]
        if rank == 2:
            del dump["entries"][0]  # its ring has lost it
        (folder / f"trace_{rank}").write_bytes(pickle.dumps(dump))


def by_torch(folder: Path, *options: str, patch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    tables: list[tuple[Any, Any]] = []

    def keep(rows: Any, headers: Any) -> None:
        tables.append((headers, rows))

    patch.setattr(utils, "tabulate", keep, raising=False)  # torch does without the package
    with pytest.raises(SystemExit):
        fr_trace.main([str(folder), "-j", *options])
    return tables[0]


def printed(folder: Path, *options: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["fr", "analyze", str(folder), "-j", *options, "-o", "json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("transfers", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        (),
        ("--selected-ranks", "0", "2"),
        ("--pg-filters", "tensor", "0"),
        ("--pg-filters", "data", "--selected-ranks", "3"),
        ("--allow-incomplete-ranks",),
    ],
)
def test_entries_are_those_that_torch_prints(
    options: tuple[str, ...],
    transfers: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write_dumps(tmp_path, transfers=transfers)
    headers, rows = by_torch(tmp_path, *options, patch=monkeypatch)
    capsys.readouterr()
    own = printed(tmp_path, *options, capsys=capsys)
    assert [f"Rank {rank}" for rank in own["ranks"]] == headers
    assert own["rows"] == rows


def test_entries_of_replica_groups_have_global_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in (2, 3):
        whole = fake.Group("0", "default_pg", (0, 1))
        job = fake.Job(2, [whole], {one: [fake.Call(whole)] for one in (0, 1)})
        job.calls[0].append(fake.Call(whole, "send", peer=1))
        job.calls[1].append(fake.Call(whole, "recv", peer=0))
        dump = fake.play(job)[rank - 2]
        (tmp_path / f"trace_{rank}").write_bytes(pickle.dumps(dump))
    options = ("--transform-ft", "--group-world-size", "2")
    monkeypatch.setattr(fr_trace, "build_db", _keep := _Kept())
    fr_trace.main([str(tmp_path), *options])
    own = printed(tmp_path, *options, capsys=capsys)
    assert {ranks["0"]["ranks"] for ranks in _keep.groups} == {"[2, 3]"}
    assert [cell.partition(",")[0] for cell in own["rows"][1]] == ["send(s=2 d=3", "recv(s=2 d=3"]


class _Kept:
    """Stands for what torch does with its dumps once they are transformed."""

    groups: list[Any]

    def __call__(self, details: dict[str, Any], *_: Any) -> None:
        self.groups = [dump["pg_config"] for dump in details.values()]


def test_stacks_and_all_fields_are_printed_on_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dumps(tmp_path)
    words = ["fr", "analyze", str(tmp_path), "-j", "-v", "--print_stack_trace"]
    assert main(words) == 0
    text = capsys.readouterr().out
    assert text.startswith("Rank 0 ")
    assert "collective_seq_id | p2p_seq_id=1" in text
    assert "stack 0: step at train.py:0" in text


@pytest.mark.parametrize(
    "options", [("--selected-ranks", "0"), ("--transform-ft",), ("--print_stack_trace",)]
)
def test_options_that_need_another_one(options: tuple[str, ...], tmp_path: Path) -> None:
    write_dumps(tmp_path)
    assert main(["fr", "analyze", str(tmp_path), *options]) == 2


def test_a_file_that_cannot_be_read_is_a_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_dumps(tmp_path)
    (tmp_path / "trace_3").write_bytes(b"no dump")
    own = printed(tmp_path, capsys=capsys)
    assert own["ranks"] == [0, 1, 2]
    assert own["notes"][0].startswith("trace_3 was left out:")
