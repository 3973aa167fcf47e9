"""Regular expressions, each search in a process of its own that cannot take long."""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from everstep.errors import EverstepError
from everstep_services.history.rank_logs import regex_process

_WITHIN_S = 10.0
_AT_ONCE = 2
_turns = asyncio.Semaphore(_AT_ONCE)


class BadRegexError(EverstepError):
    """The expression is none, or takes too long."""


async def matching(pattern: str, texts: Sequence[str]) -> set[int]:
    """The places of the texts in which the expression is found; `BadRegexError` if it cannot be."""
    async with _turns:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(Path(regex_process.__file__)),
            stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL, env={},
        )  # fmt: skip
        lines = "\n".join(texts).encode("utf-8", "replace")
        try:
            async with asyncio.timeout(_WITHIN_S):
                output, _ = await process.communicate(json.dumps(pattern).encode() + b"\n" + lines)
        except TimeoutError:
            output = b""
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if process.returncode or not output:
        raise BadRegexError(
            f"{pattern!r} takes longer than {regex_process.CPU_S} s of processor time on these "
            f"lines: make it simpler, or narrow the search by round, rank or time"
        )
    answer = json.loads(output)
    if "error" in answer:
        raise BadRegexError(f"{pattern!r} is not a regular expression: {answer['error']}")
    return set(answer["places"])
