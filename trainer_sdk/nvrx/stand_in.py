"""Import it first: then `import nvidia_resiliency_ext` finds the modules of `trainer_sdk.nvrx`.

Where NVRx is installed, its own modules are found, and that is reported in one line; `everstep run
--replace-nvrx` replaces them. Processes that are started by `multiprocessing` find the same.
"""

import os
import sys

from trainer_sdk import layout
from trainer_sdk.environment import environ
from trainer_sdk.nvrx.aliases import FOLDER

if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)
    environ.setdefault(layout.STAND_IN_VARIABLE, "missing")
    environ["PYTHONPATH"] = os.pathsep.join(  # for the processes it starts
        filter(None, [FOLDER, environ.get("PYTHONPATH", "")])
    )
