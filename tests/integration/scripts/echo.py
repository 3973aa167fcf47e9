"""Says what it was given, as JSON."""

import json
import os
import sys

import_path = sys.path[0]
main = sys.modules["__main__"]
print(
    json.dumps(
        {
            "argv": sys.argv,
            "file": main.__file__,
            "spec": str(main.__spec__),
            "path": import_path,
            "cwd": os.getcwd(),
            "environ": dict(os.environ),
            "ppid": os.getppid(),
            "sid": os.getsid(0),
            "fds": sorted(os.listdir("/proc/self/fd")),
        }
    )
)
