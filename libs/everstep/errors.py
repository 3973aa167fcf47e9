"""The one root of every error that an operator may read."""


class EverstepError(Exception):
    """Something an operator can act on: its text says what happened, to whom, and what to do.

    At the top of a process it is one line and exit code 2. Any other exception that gets
    there is a bug and keeps its traceback.
    """
