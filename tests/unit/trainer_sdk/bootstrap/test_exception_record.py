"""What a rank writes of a collective that has failed."""

import subprocess
import sys
from pathlib import Path

import msgspec

from trainer_sdk import layout

_SCRIPT = """
import os, sys, torch, torch.distributed as dist
from trainer_sdk.bootstrap import exception_record
store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
group = dist.new_group([0])
try:
    dist.all_to_all_single(torch.empty(4), torch.ones(4), [4], [5], group=group)
except RuntimeError as error:
    exception_record.write_flight_recorder({"RANK": "0"}, sys.argv[1], error)
"""


def test_the_sizes_of_a_failed_all_to_all_are_in_the_dump(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _SCRIPT, str(tmp_path)], check=True, timeout=120)
    content = (tmp_path / f"{layout.FLIGHT_PREFIX}0").read_bytes()
    assert msgspec.json.decode(content)["all_to_all"] == {
        "ranks": [0], "sends": [5], "receives": [4],
    }  # fmt: skip
