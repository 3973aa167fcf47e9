"""All ranks hold a connection to rank 0; one of them raises, and the others lose theirs."""

import sys

from tests.e2e.scripts.meeting import Meeting

meeting = Meeting()
meeting.step(go_on=True)
if meeting.rank == int(sys.argv[1]):
    raise ValueError("the root cause")
while True:
    meeting.step(go_on=True)
