#!/usr/bin/env python3
"""Is the service in this container at work? Its checks pass, and each METRIC is above 0.

usage: everstep-healthy [METRIC...]
"""

import sys
from http.client import HTTPConnection, HTTPException

HOST, PORT = "127.0.0.1", 9464


def main() -> int:
    """Exit code 0, or 1 and the reason, which `docker inspect` shows."""
    try:
        said = [get(path) for path in ("/healthz", "/metrics")]
    except (OSError, HTTPException) as error:
        return tell(f"nothing answers at {HOST}:{PORT}: {error}")
    for status, body in said:
        if status != 200:
            return tell(body)
    lines = [line for line in said[1][1].splitlines() if line and not line.startswith("#")]
    values = dict(line.rsplit(" ", 1) for line in lines)
    missing = [name for name in sys.argv[1:] if not float(values.get(name, 0)) > 0]
    return tell(f"not yet: {', '.join(missing)}") if missing else 0


def get(path: str) -> tuple[int, str]:
    """The status and the body of an answer."""
    connection = HTTPConnection(HOST, PORT, timeout=2)
    try:
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode(errors="replace")
    finally:
        connection.close()


def tell(reason: str) -> int:
    """Exit code 1, with its reason."""
    sys.stdout.write(reason)
    return 1


if __name__ == "__main__":
    sys.exit(main())
