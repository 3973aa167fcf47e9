"""Reads logs of a training, of any launcher, and names what failed first, and where.

rules.toml       what each kind of line means, with its source
rules.py         the rules, and the kind of a line
files.py         files that people name, read into an analysis
chunks.py        files in pieces, and the few lines in them that can mean anything
parsed_line.py   what one line means by itself
line_templates.py
                 what lines mean that differ in numbers only
file_lines.py    what is known of the lines of a file, and of its tracebacks
word_filter.py   which lines have one of many words, all lines at once
origins.py       whose line it is: rank, node
clocks.py        when it was written, and which of two was certainly earlier
tracebacks.py    Python's tracebacks, line by line
fingerprint.py   a failure's name without its numbers
line_analysis.py what is kept of each rank's lines
attempts.py      where one attempt of a training ends, and the next begins
progress.py      how far it came
analysis.py      the verdict on all lines
judgement.py     which failure began it
report.py        the verdict as data and as text
"""
