"""A rank that was forked from the forge cannot tell, and neither can its script."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from everstep_services.agent.ranks.protocol import RankRuns
from tests.integration.scripts.rig import Node, opened
from tests.variants import variant
from trainer_sdk.page_content import CountedBy, RankPhase
from trainer_sdk.wire import ForgeDown, ForgeUp, Stepped

pytestmark = pytest.mark.timeout(180)  # each cold rank and each forge imports torch

OURS = {
    *["EVERSTEP_AGENT", "EVERSTEP_LOCK", "EVERSTEP_SOCKET", "EVERSTEP_PAGE", "EVERSTEP_RANK_DIR"],
    *["EVERSTEP_SURVIVE", "EVERSTEP_ROUND", "TORCHELASTIC_ERROR_FILE", "TORCH_FR_BUFFER_SIZE"],
    "TORCH_INCLUDE_STACK_TRACE",
    *["TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DUMP_ON_TIMEOUT"],
}


async def ran(node: Node, *, warm: bool, ranks: int = 1, **extra: str) -> list[Any]:
    if warm:
        await node.next(ForgeUp)
    await node.start(ranks, warm=warm, **extra)
    assert {event.start for event in await node.next(RankRuns, ranks)} == {
        "warm" if warm else "cold"
    }
    gone = await node.gone(ranks)
    assert {gone[rank].code for rank in gone} == {0}, node.err()
    return [json.loads(node.out(rank)) for rank in range(ranks)]


@pytest.mark.parametrize("warm", [variant(False), True])
async def test_a_rank_has_the_environment_that_it_was_given(tmp_path: Path, warm: bool) -> None:
    """The recorder is armed by default, and a user's own settings stay (A7.4)."""
    odd = os.fsdecode(b"\xff\xfe=odd")
    given = {"ODD": odd, "TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "7"}
    async with opened(tmp_path, "echo.py", "a b", "--c=d", warm=warm, preload=()) as node:
        (said,) = await ran(node, warm=warm, ranks=1, **given)
        environ = said["environ"]
        expected = {**node.plan.environ, **given, "RANK": "0", "LOCAL_RANK": "0"}
        own = OURS - {"TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_BUFFER_SIZE"}
        assert environ.keys() - expected.keys() == own | {
            *["WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"]
        }
        assert {name: environ[name] for name in expected} == expected
        target = node.plan.command.target
        assert said["argv"] == [target, "a b", "--c=d"]
        assert (said["file"], said["spec"]) == (target, "None")
        assert said["path"] == str(Path(target).parent)
        assert said["cwd"] == str(node.plan.cwd)
        assert said["ppid"] == node.warden()
        assert said["sid"] != os.getsid(0)


@pytest.mark.parametrize("warm", [variant(False), True])
async def test_a_module_runs_as_with_python_m(tmp_path: Path, warm: bool) -> None:
    async with opened(
        tmp_path, "", "x", target="echo", kind="module", warm=warm, preload=()
    ) as node:
        (said,) = await ran(node, warm=warm)
        assert said["argv"] == [str(node.plan.cwd / "echo.py"), "x"]
        assert "name='echo'" in said["spec"]
        assert said["path"] == str(node.plan.cwd)


@pytest.mark.parametrize("warm", [variant(False), True])
async def test_what_trainings_use_works(tmp_path: Path, warm: bool) -> None:
    async with opened(tmp_path, "worker.py", warm=warm) as node:
        said = await ran(node, warm=warm, ranks=2, OMP_NUM_THREADS="2")
        for one in said:
            assert one["squares"] == [1, 4, 9]
            assert one["loaded"] == [[0, 1, 2, 3], [4, 5, 6, 7]]
            assert one["threads"] == 2
            assert "200" in one["pong"]
        for drawn in ("numpy", "random", "torch"):
            assert said[0][drawn] != said[1][drawn]
        page = node.keeper.page(0)
        assert page is not None
        assert (page.step, page.phase, page.counted_by) == (5, RankPhase.ENDED, CountedBy.OPTIMIZER)
        assert len(await node.next(Stepped, 2)) == 2
        assert node.err() == ""


PERSISTENT = """\
import json, multiprocessing, os, signal
from {library} import {name}
loader = {name}(list(range(64)), num_workers=2, persistent_workers=True)
batches = iter(loader)
next(batches)
workers = [child.pid for child in multiprocessing.active_children()]
for pid in workers:
    os.kill(pid, signal.SIGTERM)
print(json.dumps({{"loaded": len(list(batches)), "workers": workers}}))
"""


@pytest.mark.parametrize(
    ("library", "name"),
    [("torch.utils.data", "DataLoader"), ("torchdata.stateful_dataloader", "StatefulDataLoader")],
)
async def test_workers_outlive_a_signal_and_end_with_their_rank(
    tmp_path: Path, library: str, name: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(PERSISTENT.format(library=library, name=name))
    async with opened(tmp_path, "", target=str(script), warm=True) as node:
        (said,) = await ran(node, warm=True)
        assert said["loaded"] == 63
        assert len(said["workers"]) == 2
        assert not [pid for pid in said["workers"] if os.path.exists(f"/proc/{pid}")]  # noqa: ASYNC240
        assert "killed by signal" not in node.err()


@pytest.mark.parametrize("warm", [variant(False), True])
async def test_an_optimizer_of_ones_own_needs_no_compiler(tmp_path: Path, warm: bool) -> None:
    async with opened(tmp_path, "own_optimizer.py", warm=warm) as node:
        (said,) = await ran(node, warm=warm)
        assert not said["was_imported"]
        assert said["weight"] == 1.0
        assert "Add a param group" in said["about"]
        assert said["name"] == "Optimizer.add_param_group"
        # From then on torch is as it was, but for what the script has changed.
        assert said["is_imported"]
        assert (said["compiled"], said["grad"]) == (2.0, None)
        assert said["files"] == ["_compile.py"]
        assert said["patched"] == {"of": "Descent"}
        assert node.err() == ""


async def test_gloo_forms_round_after_round(tmp_path: Path) -> None:
    async with opened(tmp_path, "allreduce.py", "wait", warm=True) as node:
        (ready,) = await node.next(ForgeUp)
        assert "torch._dynamo" in ready.preloaded, "each rank's optimizer would import it"
        for _ in range(3):
            await node.start(4, warm=True)
            assert {event.start for event in await node.next(RankRuns, 4)} == {"warm"}
            await node.next(Stepped, 4)
            assert len((await node.keeper.stop(grace_s=5)).ranks) == 4
            assert {event.signal for event in (await node.gone(4)).values()} == {"SIGTERM"}


async def test_a_start_waits_for_a_forge_that_is_importing(tmp_path: Path) -> None:
    async with opened(tmp_path, "echo.py", warm=True, preload=(), bare=True) as node:
        await node.start(1, warm=True)
        (runs,) = await node.next(RankRuns)
        assert runs.start == "warm"


async def test_a_module_that_starts_a_thread_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "busy.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    script = tmp_path / "script.py"
    script.write_text("print('{}')\n")
    async with opened(
        tmp_path, "", target=str(script), warm=True, preload=("busy", "colorsys"), bare=True
    ) as node:
        (unfit,) = await node.next(ForgeDown)
        assert unfit.reason == "1 more thread(s) run in it (after `import busy`)"
        assert not unfit.final
        (ready,) = await node.next(ForgeUp)
        assert "colorsys" in ready.preloaded
        assert not {"busy", "torch._dynamo"} & set(ready.preloaded)


async def test_a_module_that_reads_the_ranks_environment_is_left_to_the_ranks(
    tmp_path: Path,
) -> None:
    """As Lightning's rank_zero_only does: else every rank would take itself for the first."""
    package = tmp_path / "imitation"
    package.mkdir()
    (package / "__init__.py").write_text("import wave\nfrom imitation.zero import rank_zero_only\n")
    (package / "zero.py").write_text(
        "import os\n"
        "def rank_zero_only(function):\n"
        "    return lambda: function() if rank_zero_only.rank == 0 else None\n"
        "rank_zero_only.rank = int(os.environ.get('RANK', 0))\n"
    )
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "was_there = 'wave' in sys.modules, 'torch' in sys.modules\n"
        "import json, imitation\n"
        "named = imitation.rank_zero_only(lambda: 'first')()\n"
        "print(json.dumps([imitation.rank_zero_only.rank, named, *was_there]))\n"
    )
    async with opened(
        tmp_path, "", target=str(script), warm=True, preload=("imitation",), bare=True
    ) as node:
        (ready,) = await node.next(ForgeUp)
        reason = "imitation.zero, which imitation imports, reads RANK while it is imported"
        assert ready.left_out == (reason,)
        node.seen.append(ready)
        said = await ran(node, warm=True, ranks=2)
        assert said == [[0, "first", True, True], [1, None, True, True]]


async def test_a_variable_that_a_rank_turns_out_to_have_makes_another_forge(tmp_path: Path) -> None:
    (tmp_path / "reader.py").write_text("import os; level = os.environ.get('OF_RANKS')\n")
    script = tmp_path / "script.py"
    script.write_text("import json, reader; print(json.dumps(reader.level))\n")
    async with opened(
        tmp_path, "", target=str(script), warm=True, preload=("reader",), bare=True
    ) as node:
        assert await ran(node, warm=True, OF_RANKS="7") == ["7"]
        (unfit,) = await node.next(ForgeDown)
        assert unfit.reason == "reader reads OF_RANKS while it is imported"


async def test_a_forge_that_cannot_be_fit_is_given_up(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    script = tmp_path / "script.py"
    script.write_text("print('{}')\n")
    async with opened(tmp_path, "", target=str(script), warm=True, preload=()) as node:
        await node.start(1, warm=True)
        (unfit,) = await node.next(ForgeDown)
        assert unfit.final
        assert "after `import torch`" in unfit.reason
        (runs,) = await node.next(RankRuns)
        assert runs.start == "cold"
        assert not node.keeper.warm


async def test_torch_is_imported_without_looking_for_garbage(tmp_path: Path) -> None:
    """Only torch: another module may rely on it, and a rank certainly does."""
    note = "import gc; collects = gc.isenabled()\n"
    (tmp_path / "named.py").write_text(note)
    (tmp_path / "torch.py").write_text(
        note + "class cuda: is_initialized = bool\nclass default_generator: seed = int\n"
    )
    script = tmp_path / "script.py"
    script.write_text(
        note + "import json, torch, named\n"
        "print(json.dumps([torch.collects, named.collects, collects]))\n"
    )
    async with opened(tmp_path, "", target=str(script), warm=True, preload=("named",)) as node:
        (said,) = await ran(node, warm=True)
        assert said == [False, True, True]


async def test_a_rank_that_has_failed_leaves_the_processors_to_others(tmp_path: Path) -> None:
    """Its exit takes long, and the next ranks are started meanwhile."""
    script = tmp_path / "script.py"
    script.write_text(
        "import atexit, os, sys\n"
        "before = os.nice(0)\n"
        "atexit.register(lambda: print(os.nice(0) - before))\n"
        "sys.exit(int(os.environ['FAILS'])) if os.environ['FAILS'] != 'raises' else 1 / 0\n"
    )
    async with opened(tmp_path, "", target=str(script), warm=False) as node:
        for fails, nicer in ("raises", 10), ("3", 10), ("0", 0):
            await node.start(1, warm=False, FAILS=fails)
            await node.gone()
            assert int(node.out().split()[-1]) == nicer, fails


@pytest.mark.parametrize("loaded", [(), (".random",)])
async def test_numpys_generator_is_seeded_in_each_rank_that_has_it(
    tmp_path: Path, loaded: tuple[str, ...]
) -> None:
    """NumPy imports it when it is used: no rank waits for what its script never uses."""
    (tmp_path / "numpy").mkdir()
    (tmp_path / "numpy" / "__init__.py").write_text("")
    (tmp_path / "numpy" / "random.py").write_text("seeds = []\nseed = lambda: seeds.append(1)\n")
    script = tmp_path / "script.py"
    script.write_text(
        "import json, sys\n"
        "generator = sys.modules.get('numpy.random')\n"
        "print(json.dumps(['numpy' in sys.modules, generator and generator.seeds]))\n"
    )
    preload = ("numpy", *(f"numpy{name}" for name in loaded))
    async with opened(
        tmp_path, "", target=str(script), warm=True, preload=preload, bare=True
    ) as node:
        (said,) = await ran(node, warm=True)
        assert said == [True, [1] if loaded else None]


async def test_what_cannot_be_imported_is_said(tmp_path: Path) -> None:
    async with opened(
        tmp_path, "echo.py", warm=True, preload=("no_such_module",), bare=True
    ) as node:
        (ready,) = await node.next(ForgeUp)
        assert ready.failed == (
            "no_such_module: ModuleNotFoundError: No module named 'no_such_module'",
        )


async def test_a_variable_that_python_reads_at_its_start_makes_a_cold_rank(tmp_path: Path) -> None:
    async with opened(tmp_path, "echo.py", warm=True, preload=(), bare=True) as node:
        await node.next(ForgeUp)
        await node.start(1, warm=True, PYTHONHASHSEED="1")
        (unfit,) = await node.next(ForgeDown)
        assert "PYTHONHASHSEED" in unfit.reason
        (runs,) = await node.next(RankRuns)
        assert runs.start == "cold"
        await node.gone()
        await node.start(1, warm=True)
        (runs,) = await node.next(RankRuns)
        assert runs.start == "warm"


async def test_a_warm_rank_has_fresh_signals(tmp_path: Path) -> None:
    script = tmp_path / "signals.py"
    script.write_text(
        "import json, signal\n"
        "status = dict(l.split(':', 1) for l in open('/proc/self/status'))\n"
        "print(json.dumps([status[k].strip() for k in ('SigBlk', 'SigIgn')]"
        " + [str(signal.getsignal(signal.SIGINT))]))\n"
    )
    async with opened(tmp_path, "", target=str(script), warm=True, preload=()) as node:
        (warm,) = await ran(node, warm=True)
        await node.start(1, warm=False)
        await node.gone()
        cold = json.loads(node.out())
        assert warm[:2] == cold[:2]
        assert warm[2].split(" at ")[0] == cold[2].split(" at ")[0]
