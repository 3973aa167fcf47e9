"""Why nothing, or not this, can be restored."""


class RestoreError(Exception):
    """The training must not go on: nothing can be loaded, or loading broke off."""


class UnfitError(Exception):
    """One checkpoint must not be loaded; another one may."""


class CorruptError(UnfitError):
    """Its files are not what was saved: nobody is to load it, and it need not stay."""
