"""Errors of a restore."""


class RestoreError(Exception):
    """The training must not go on: nothing can be loaded, or loading failed halfway."""


class UnfitError(Exception):
    """A checkpoint that must not be loaded; others may be."""


class CorruptError(UnfitError):
    """The files differ from what was saved: no rank may load them, and a save may replace them."""
