"""`everstep` on the command line: stdout is data, stderr talk, the exit code the answer."""
