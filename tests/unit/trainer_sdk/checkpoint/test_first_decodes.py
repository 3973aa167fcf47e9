"""Threads decode documents: msgspec crashes where two look at a class first at the same time."""

import subprocess
import sys

import pytest

_COUNTED = """
import sys
import msgspec
{imports}
looks = []
def look(frame, event, _):
    if event == "call" and frame.f_code.co_name == "get_class_annotations":
        looks.append(frame.f_locals)
sys.setprofile(look)
for kind in ({kinds},):
    try:
        msgspec.json.decode(b"[]", type=kind)
    except msgspec.DecodeError:
        pass
sys.setprofile(None)
print(len(looks))
"""
_LATE = "class Late(msgspec.Struct):\n    name: str"


@pytest.mark.parametrize(
    ("imports", "kinds", "looks"),
    [
        (_LATE, "Late", 1),
        ("import trainer_sdk.checkpoint.manifest as m", "m.RankPart, m.Manifest, m.ImageIndex", 0),
        ("import trainer_sdk.checkpoint.writer.protocol as p", "p.FromWriter, p.ToWriter", 0),
        (
            "import trainer_sdk.checkpoint.storage.checkpoints as c",
            "c.RootOwner, c.CheckpointMark",
            0,
        ),
        (
            "import everstep_services.attribution.analyzers.runner\n"
            "import everstep.evidence.nccl_ras as r\n"
            "import everstep_services.attribution.analyzers.node_state as n\n"
            "import everstep_services.attribution.flight_recorder.folder as f\n"
            "import everstep_services.attribution.log_analysis.origins as o\n"
            "import everstep.evidence.py_spy as s",
            "r.RasReport, n._Gpus, n._Groups, n._Pages, n._Processes, f.SummaryAnswer, "
            "f.EntriesAnswer, o._DockerLine, s.SpyThread",
            0,
        ),
    ],
    ids=["late", "manifest", "writer", "storage", "attribution"],
)
def test_what_threads_decode_was_looked_at_when_it_was_imported(
    imports: str, kinds: str, looks: int
) -> None:
    script = _COUNTED.format(imports=imports, kinds=kinds)
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"{looks}\n"), done.stderr
