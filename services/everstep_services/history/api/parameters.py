"""What may stand in a path or a filter, of whatever is asked."""

from typing import Annotated

from fastapi import Path
from pydantic import Field

NAME = r"^[A-Za-z0-9_-]{1,128}$"
TEXT = r"^[^\x00-\x1f\x7f]*$"
LARGEST = 2**53 - 1
Word = Annotated[str, Field(max_length=256, pattern=TEXT)]

JobName = Annotated[str, Path(pattern=NAME, description="The job's id.", examples=["llama-8b"])]
RoundNumber = Annotated[int, Path(ge=0, le=LARGEST, description="The round's number.")]
NodeName = Annotated[str, Path(pattern=NAME, description="The node's id.", examples=["node-07"])]
