"""One file a command: its name is the file's, its one-line help the file's docstring."""
