"""What is wrong with a trace."""

from pathlib import Path

from everstep.errors import EverstepError


class TraceError(EverstepError):
    """A file cannot be used: the text says which, where and why."""

    def __init__(self, path: Path, text: str) -> None:
        super().__init__(f"{path}: {text}")
