"""What `import trainer_sdk` costs, next to a bare Python and the one library it may need (A1.1)."""

import statistics
import subprocess
import sys
import time

RUNS = 30
TARGET_MS = 100
PROGRAMS = {
    "python -c pass": "pass",
    "import msgspec": "import msgspec",
    "import trainer_sdk": "import trainer_sdk",
}


def took_ms(program: str) -> float:
    """From the start of a fresh interpreter to its end."""
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", program], check=True)
    return (time.perf_counter() - began) * 1000


def main() -> int:
    """Exit code 1 when importing the SDK takes longer than the target."""
    took: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for program in PROGRAMS.values():
        took_ms(program)  # the first reads from the disk, and compiles
    for _ in range(RUNS):  # in turns: what else this machine does hits all of them
        for name, program in PROGRAMS.items():
            took[name].append(took_ms(program))
    print(f"{'':20}{'min':>9}{'median':>9}{'max':>9}{'n':>5}   more than bare Python (median)")
    bare = statistics.median(took["python -c pass"])
    for name, times in took.items():
        middle = statistics.median(times)
        print(
            f"{name:20}{min(times):6.1f} ms{middle:6.1f} ms{max(times):6.1f} ms{len(times):5}"
            f"   {middle - bare:+.1f} ms"
        )
    cost = statistics.median(took["import trainer_sdk"]) - bare
    print(f"target: under {TARGET_MS} ms; {'met' if cost < TARGET_MS else 'MISSED'}")
    return 0 if cost < TARGET_MS else 1


if __name__ == "__main__":
    sys.exit(main())
