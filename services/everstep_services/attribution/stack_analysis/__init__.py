"""Reads stacks of a job's ranks, and names the ranks that stand elsewhere than the others.

rules.toml       what each kind of frame means, with its source
rules.py         the rules, and what a thread does by its frames
stacks.py        frames, threads, and the stacks of a rank
dumps.py         what py-spy and faulthandler print, into stacks
files.py         files, folders and archives that people name
analysis.py      equal stacks folded, and which ranks are odd
report.py        the answer as data, as text, and folded for flame graphs
"""
