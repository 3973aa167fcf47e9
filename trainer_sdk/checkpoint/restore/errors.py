"""Why nothing, or not this, can be restored."""


class RestoreError(Exception):
    """The training must not go on: nothing can be loaded, or loading broke off."""


class UnfitError(Exception):
    """One checkpoint must not be loaded; another one may."""
