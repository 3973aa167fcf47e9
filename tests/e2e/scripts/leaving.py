"""Makes steps until the file `end` is there; then all ranks exit with the code in the file `code`.

The script numbers its steps. With `MEANT` it has the module by which 16 and 17 are meant.
"""

import os
import sys
import time
from pathlib import Path
from types import ModuleType

from tests.e2e.scripts.meeting import Meeting
from tests.e2e.scripts.stepping import Steps

if "MEANT" in os.environ:
    name = "megatron.core.rerun_state_machine"
    sys.modules[name] = ModuleType(name)
folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
saved = folder / "step"
steps, meeting = Steps(int(saved.read_text()) if saved.exists() else 0), Meeting()
while meeting.step(go_on=not (folder / "end").exists()):
    time.sleep(0.02)
    steps.made_one()
code = int((folder / "code").read_text())
if rank == 0:
    saved.write_text(str(steps.made))
    (folder / "end").unlink()
meeting.step(go_on=True)
sys.exit(code)
