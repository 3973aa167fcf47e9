"""Ends in the way that its arguments name."""

import atexit
import os
import sys
import threading

how = sys.argv[1]
atexit.register(print, "exit handler ran")


def late() -> None:
    threading.main_thread().join()
    print("thread ended")


if how == "return":
    threading.Thread(target=late).start()
elif how == "exit":
    sys.exit(int(sys.argv[2]))
elif how == "text":
    sys.exit("a reason")
elif how == "hard":
    print("half a line", end="", flush=True)
    os._exit(int(sys.argv[2]))
elif how == "signal":
    os.kill(os.getpid(), int(sys.argv[2]))
elif how == "interrupt":
    raise KeyboardInterrupt
elif how == "thread":
    failing = threading.Thread(target=[].pop)
    failing.start()
    failing.join()
elif how == "import":
    import failing_module  # type: ignore[import-not-found]  # noqa: F401
elif how == "missing":
    import no_such_module_anywhere  # type: ignore[import-not-found]  # noqa: F401
elif how == "chain":
    try:
        os.environ["INNER"]
    except KeyError as error:
        raise RuntimeError("outer") from error
elif how == "segfault":
    import ctypes

    ctypes.string_at(0)
