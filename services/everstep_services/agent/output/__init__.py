"""The output of ranks: the files that keep it, and the console that shows it."""
