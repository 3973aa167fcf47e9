"""Makes steps for ever, while a thread beats and reports its longest pause."""

import sys
import threading
import time

import trainer_sdk

print("injection:", "trainer_sdk.inject" in sys.modules, flush=True)
run = trainer_sdk.session()


def beat() -> None:
    longest, last, beats = 0.0, time.monotonic(), 0
    while True:
        beats += 1
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        run.report("gap", longest)
        run.report("beats", beats)
        time.sleep(0.005)


threading.Thread(target=beat, daemon=True).start()
while True:
    with run.section("forward"):
        time.sleep(0.01)
    run.step()
