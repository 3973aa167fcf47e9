"""The public names of the SDK; all other names may change at any time (E8).

docs/guides/sdk.md lists the same.
"""

import importlib
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[3] / "docs/guides/sdk.md"
MODULES = {
    "trainer_sdk": ["Checkpointer", "GpuCheck", "Section", "Session", "gpu_check", "session"],
    "trainer_sdk.checkpoint": [
        *["BadLossError", "Checkpointer", "FileSaver", "Latest", "PerRank", "PositionedSampler"],
        *["RestoreError", "Restored", "RngState", "SaveError", "SaveHandle", "Timeouts"],
        *["async_save", "wait_for_files"],
    ],
    "trainer_sdk.numerics": ["NumericsPolicy"],
}
MEMBERS = {
    "trainer_sdk:Session": [
        *["begin", "close", "end", "end_all", "heartbeat", "is_watched", "numerics", "pause"],
        *["report", "report_to_tensorboard", "report_to_wandb", "request", "resume", "section"],
        *["share", "should_save", "should_stop", "start_at"],
        *["step", "steps_made", "survive", "time_device", "trace_kernels", "warm_up"],
    ],
    "trainer_sdk:Checkpointer": [
        *[
            "check_loss",
            "close",
            "latest",
            "maybe_finalize",
            "restore",
            "save",
            "save_last",
            "step",
        ],
        *["unfinished"],
        *["acts", "course", "roll_back"],  # called by `Numerics`
    ],
    "trainer_sdk.numerics.numerics:Numerics": [
        *["accepts", "compute", "load_state_dict", "may_be_absent", "state_dict"],
        *["finish", "leave"],  # called by integrations of frameworks
    ],
    "trainer_sdk.checkpoint:FileSaver": [
        *["close", "maybe_finalize", "schedule", "schedule_content", "unfinished"]
    ],
    "trainer_sdk.checkpoint:SaveHandle": [
        *["durable", "error", "file_hash", "number", "reason", "state", "step", "wait"]
    ],
    "trainer_sdk.checkpoint:Timeouts": ["delayed_after_s", "exit_within_s", "write_within_s"],
}


@pytest.mark.parametrize("name", MODULES)
def test_a_module_exports_its_public_names_alone(name: str) -> None:
    module = importlib.import_module(name)
    assert sorted(module.__all__) == sorted(MODULES[name])
    assert all(getattr(module, one) is not None for one in MODULES[name])


@pytest.mark.parametrize("path", MEMBERS)
def test_a_class_has_its_public_members_alone(path: str) -> None:
    module, _, name = path.partition(":")
    found = getattr(importlib.import_module(module), name)
    assert sorted(one for one in dir(found) if not one.startswith("_")) == sorted(MEMBERS[path])


@pytest.mark.parametrize("name", sorted({one for names in MODULES.values() for one in names}))
def test_the_guide_lists_each_public_name(name: str) -> None:
    assert f"`{name}`" in GUIDE.read_text(encoding="utf-8").partition("## Public names")[2]
