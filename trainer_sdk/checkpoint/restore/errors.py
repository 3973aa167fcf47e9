"""Errors of a restore."""


class RestoreError(Exception):
    """The training must not go on: nothing can be loaded, or loading failed halfway."""


class UnfitError(Exception):
    """One checkpoint must not be loaded; another one may."""


class CorruptError(UnfitError):
    """The files are not what was saved: no rank may load them, and they need not stay."""
