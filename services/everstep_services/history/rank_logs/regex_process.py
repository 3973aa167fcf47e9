"""A process that searches lines for a regular expression, and may take too long or too much.

    stdin   one line of JSON with the pattern, then the lines
    stdout  one line of JSON: the places of those that match, or why the pattern is none

It is run with `python -I -S`: only the standard library is here. A pattern can take for ever, and
holds the interpreter while it does: so it has a process, and the kernel ends that.
"""

import json
import re
import resource
import sys

CPU_S = 5
MEMORY_BYTES = 1 << 30


def main() -> None:
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    data = sys.stdin.buffer
    pattern = json.loads(data.readline())
    try:
        search = re.compile(pattern).search
    except (re.error, OverflowError, RecursionError) as error:
        answer: dict[str, object] = {"error": str(error)}
    else:
        lines = data.read().decode("utf-8", "replace").split("\n")
        answer = {"places": [place for place, line in enumerate(lines) if search(line)]}
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
