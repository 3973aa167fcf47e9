"""Reads dumps of torch's flight recorder, without torch, and names the ranks that others wait for.

folder.py        finds dumps, and has each one read in a process of its own
dump_file.py     decodes a file: JSON, or a pickle that can hold nothing but data
fields.py        reads the fields of entries, which may hold anything
calls.py         the calls and groups of a dump while it is read
dump.py          one dump into a `RankSummary`
summary.py       what is kept of a rank: the same few kilobytes, however large its dump was
stack_calls.py   what only the stack tells: the peer of gloo's transfers, the root of a collective
mismatches.py    do the ranks of a group call the same collectives?
waits.py         who waits for whom, as a graph
graph.py         the components of a graph
faults.py        the ends of the waiting: faults, and their suspects
analysis.py      all summaries of a job into its report
report.py        the answer, as data and as text
ranges.py        many ranks in few words
"""
