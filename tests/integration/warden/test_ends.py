"""How a rank's script may end, cold and warm: exactly as under Python itself, and on record."""

import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from everstep.clock import SystemClock
from everstep_services.agent.collectors.collection import Scene
from everstep_services.agent.collectors.stacks import written_stacks
from everstep_services.agent.ranks.protocol import RankGone, RankRuns, ScriptEnded
from everstep_services.attribution.stack_analysis.dumps import read_stacks
from tests.integration.scripts.rig import SCRIPTS, Node, opened
from tests.stopping import stop
from tests.waiting import until_async
from trainer_sdk import layout
from trainer_sdk.wire import ForgeUp, Stepped

ENDS = [
    ("return", 0),
    ("exit", 0),
    ("exit", 7),
    ("exit", 300),
    ("text", 1),
    ("hard", 9),
    ("thread", 0),
    ("import", 1),
    ("missing", 1),
    ("chain", 1),
]
FAILURES = {
    "import": ("ValueError", "failing_module.py", "raise ValueError", "broken"),
    "missing": ("ModuleNotFoundError", "end.py", "no_such_module", "<module>"),
    "chain": ("RuntimeError", "end.py", "from error", "<module>"),
    "text": ("SystemExit", "end.py", "a reason", "<module>"),
}


def plain(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPTS / "end.py"), *arguments],
        capture_output=True,
        check=False,
        text=True,
        cwd=SCRIPTS,
        timeout=30,
    )


async def end(node: Node, *, warm: bool) -> RankGone:
    if warm:
        await node.next(ForgeUp)
    await node.start(warm=warm)
    (runs,) = await node.next(RankRuns)
    assert runs.start == ("warm" if warm else "cold")
    return (await node.gone())[0]


@pytest.mark.parametrize(("how", "code"), ENDS)
async def test_a_cold_rank_ends_as_under_python(tmp_path: Path, how: str, code: int) -> None:
    async with opened(tmp_path, "end.py", how, str(code)) as node:
        gone = await end(node, warm=False)
        expected = plain(how, str(code))
        assert (gone.code, gone.signal) == (expected.returncode, None)
        assert (node.out(), node.err()) == (expected.stdout, expected.stderr)
        if how in FAILURES:
            await check_record(node, *FAILURES[how])
        elif how != "exit":
            assert await node.keeper.error(0) is None


async def test_a_warm_rank_ends_as_under_python(tmp_path: Path) -> None:
    async with opened(tmp_path, "end.py", "chain", warm=True, preload=()) as node:
        gone = await end(node, warm=True)
        expected = plain("chain")
        assert (gone.code, gone.signal) == (1, None)
        assert (node.out(), node.err()) == (expected.stdout, expected.stderr)
        await check_record(node, *FAILURES["chain"])


async def check_record(node: Node, name: str, file: str, text: str, function: str) -> None:
    lines = (SCRIPTS / file).read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if text in line)
    place = f"{file}:{number} in {function}"
    record = await node.keeper.error(0)
    assert record is not None
    assert (record.name, record.place) == (name, place)
    assert record.at is not None
    assert len(record.text.encode()) <= 4096
    assert record.chain == (("KeyError",) if name == "RuntimeError" else ())
    elastic = json.loads((node.rank_folder() / "torchelastic_error.json").read_text())
    assert elastic["message"]["message"].startswith(f"{name}: ")
    assert "Traceback" in elastic["message"]["extraInfo"]["py_callstack"]
    (ended,) = await node.next(ScriptEnded)
    assert (ended.code, ended.was_told) == (1, False)


async def test_what_a_rank_raises_because_it_is_stopped_is_known_as_that(tmp_path: Path) -> None:
    script = tmp_path / "raises.py"
    script.write_text(
        "import signal, trainer_sdk\n"
        "def leave(number, frame): raise RuntimeError('stopped in the middle')\n"
        "signal.signal(signal.SIGTERM, leave)\n"
        "trainer_sdk.session().step()\n"
        "while True: signal.pause()\n"
    )
    async with opened(tmp_path, "", target=str(script)) as node:
        await node.start(1)
        await node.next(Stepped)
        await node.keeper.stop(grace_s=60)
        (ended,) = await node.next(ScriptEnded)
        assert (ended.code, ended.was_told) == (1, True)


async def test_a_script_that_cannot_be_compiled_says_where(tmp_path: Path) -> None:
    script = tmp_path / "bad.py"
    script.write_text("x = (\n")
    async with opened(tmp_path, "", target=str(script)) as node:
        assert (await end(node, warm=False)).code == 1
        record = await node.keeper.error(0)
        assert record is not None
        assert (record.name, record.place) == ("SyntaxError", f"{script}:1")
        assert node.err().splitlines()[0].strip() == f'File "{script}", line 1'


async def test_a_script_that_is_missing_is_an_exit_code_of_two(tmp_path: Path) -> None:
    async with opened(tmp_path, "nowhere.py") as node:
        assert (await end(node, warm=False)).code == 2
        assert "can't open file" in node.err()
        record = await node.keeper.error(0)
        assert record is not None, "else it is taken for wrong arguments"
        assert (record.name, "nowhere.py" in record.text) == ("FileNotFoundError", True)


@pytest.mark.parametrize("name", ["SIGKILL", "SIGABRT", "SIGINT"])
async def test_a_signal_that_ends_a_rank_is_named(tmp_path: Path, name: str) -> None:
    number = int(signal.Signals[name])
    how = ("interrupt",) if name == "SIGINT" else ("signal", str(number))
    async with opened(tmp_path, "end.py", *how) as node:
        gone = await end(node, warm=False)
        assert (gone.code, gone.signal) == (None, name)
        if name == "SIGABRT":
            assert "Fatal Python error: Aborted" in node.err()
        if name == "SIGINT":
            assert "exit handler ran" in node.out()
            assert node.err().count("Traceback") == 1


async def test_what_record_has_written_is_kept(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text(
        "import os\nopen(os.environ['TORCHELASTIC_ERROR_FILE'], 'w').write('mine')\n1 / 0\n"
    )
    async with opened(tmp_path, "", target=str(script)) as node:
        await end(node, warm=False)
        folder = node.rank_folder()
        assert (folder / "torchelastic_error.json").read_text() == "mine"
        record = await node.keeper.error(0)
        assert record is not None
        assert record.name == "ZeroDivisionError"


async def test_an_exception_leaves_the_flight_recorder(tmp_path: Path) -> None:
    """The ranks that a wrong collective ends are gone before anybody can ask their recorders."""
    script = tmp_path / "mismatch.py"
    script.write_text(
        "import torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(7))\n"
        "1 / 0\n"
    )
    async with opened(tmp_path, "", target=str(script)) as node:
        await end(node, warm=False)
        content = (node.rank_folder() / f"{layout.FLIGHT_PREFIX}0").read_bytes()
    (entry,) = json.loads(content)["entries"]
    assert (entry["profiling_name"], entry["input_sizes"]) == ("gloo:all_reduce", [[7]])


async def test_a_script_without_collectives_leaves_no_flight_recorder(tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.write_text("1 / 0\n")
    async with opened(tmp_path, "", target=str(script)) as node:
        await end(node, warm=False)
        assert not list((node.rank_folder()).glob(f"{layout.FLIGHT_PREFIX}*"))


async def test_a_program_that_is_not_python_runs_as_it_is(tmp_path: Path) -> None:
    async with opened(
        tmp_path, "", "-c", "echo $RANK; exit 3", target="sh", kind="program"
    ) as node:
        await node.start(2)
        gone = await node.gone(2)
        assert {rank: gone[rank].code for rank in gone} == {0: 3, 1: 3}
        assert (node.out(0), node.out(1)) == ("0\n", "1\n")


async def test_a_program_that_does_not_exist_says_so(tmp_path: Path) -> None:
    async with opened(tmp_path, "", target="no-such-program", kind="program") as node:
        await node.start()
        assert (await node.gone())[0].code == 127
        assert "no-such-program" in node.err()


async def test_a_rank_that_is_ended_writes_its_stacks(tmp_path: Path) -> None:
    """A7.5: nobody waits for a reader from outside; a rank that stands still ends without them."""
    script = tmp_path / "held.py"
    script.write_text(
        "import ctypes\ndef holds():\n    print('here', flush=True)\n"
        "    ctypes.PyDLL(None).sleep(1000)\nholds()\n"
    )
    async with opened(tmp_path, "", target=str(script)) as node:
        await node.start(2)
        pids = {event.rank: event.pid for event in await node.next(RankRuns, 2)}
        for rank in pids:
            await until_async(partial(node.out, rank), "here", holds=lambda out: "here" in out)
        stop(pids[1])
        done = await node.keeper.stop(grace_s=600)
        assert (done.ranks, done.left) == ((0, 1), ())
        gone = await node.gone(2)
        assert {(one.signal, one.was_told) for one in gone.values()} == {("SIGTERM", True)}
        found = await written_stacks(Scene(node.keeper.watch.seen(), 30.0), SystemClock())
    assert found is not None
    assert found.summary.startswith("rank 0: holds (held.py:4)")
    assert found.missing == {1: "the rank had exited"}
    (thread,) = read_stacks(found.members[0].content, 0).threads
    assert [frame.name for frame in thread.frames][:2] == ["holds", "<module>"]


@pytest.mark.parametrize(
    ("loaded", "code", "asks"),
    [
        ("trainer_sdk.numerics.rollback", 16, "move"),
        ("megatron.core.rerun_state_machine", 17, "stop"),
        ("trainer_sdk.numerics.rollback", 18, ""),
        ("numpy", 16, ""),
    ],
)
async def test_an_exit_code_asks_for_something_only_where_it_is_meant(
    tmp_path: Path, loaded: str, code: int, asks: str
) -> None:
    script = tmp_path / "leave.py"
    script.write_text(
        f"import sys, types\nsys.modules[{loaded!r}] = types.ModuleType({loaded!r})\n"
        f"sys.exit({code})\n"
    )
    async with opened(tmp_path, "", target=str(script)) as node:
        assert (await end(node, warm=False)).code == code
        record = await node.keeper.error(0)
    assert record is not None
    assert (record.name, record.asks) == ("SystemExit", asks)
