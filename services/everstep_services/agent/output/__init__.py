"""What ranks write: the files that keep it, and the console that shows it."""
