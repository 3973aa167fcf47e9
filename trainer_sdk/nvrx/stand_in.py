"""Import it first: then `import nvidia_resiliency_ext` finds the modules of `trainer_sdk.nvrx`.

Where NVRx is installed, its own modules are found, and that is reported in one line; `everstep run
--replace-nvrx` replaces them. Processes that are started by `multiprocessing` find the same.
"""

import os
import sys

from trainer_sdk import layout
from trainer_sdk.nvrx.aliases import FOLDER

if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)
    os.environ.setdefault(layout.STAND_IN_VARIABLE, "missing")  # noqa: TID251
    os.environ["PYTHONPATH"] = os.pathsep.join(  # noqa: TID251 - for the processes it starts
        filter(None, [FOLDER, os.environ.get("PYTHONPATH", "")])  # noqa: TID251
    )
