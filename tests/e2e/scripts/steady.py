"""Makes steps until the file `end` is there, and goes on from the step that it had reached.

While the file `hold` is there it makes no step. With `UNMODIFIED` it does not know the SDK. Woken
by SIGCONT it writes to `woken-RANK` how long it has come no further.
"""

import os
import signal
import sys
import time
from pathlib import Path

from tests.e2e.scripts.meeting import Meeting
from tests.e2e.scripts.stepping import OptimizerSteps, Steps

folder, rank = Path(sys.argv[1]), int(os.environ["RANK"])
saved = folder / "step"
counted = OptimizerSteps if "UNMODIFIED" in os.environ else Steps
steps = counted(int(saved.read_text()) if saved.exists() else 0)
print(
    f"rank {rank} of {os.environ['WORLD_SIZE']}, restart", os.environ["TORCHELASTIC_RESTART_COUNT"]
)
print(f"rank {rank} goes on from step {steps.made}", file=sys.stderr)
meeting, turned = Meeting(), time.monotonic()


def woken(number: int, frame: object) -> None:
    (folder / f"woken-{rank}").write_text(str(time.monotonic() - turned))


signal.signal(signal.SIGCONT, woken)
while meeting.step(go_on=not (folder / "end").exists()):
    turned = time.monotonic()
    time.sleep(0.02)
    if (folder / "hold").exists():
        continue
    steps.made_one()
    if rank == 0:
        fresh = saved.with_suffix(".new")
        fresh.write_text(str(steps.made))
        fresh.replace(saved)
print(f"rank {rank} ends at step {steps.made}")
