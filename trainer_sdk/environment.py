"""The environment of the rank: a script has no settings file of ours."""

import os

environ = os.environ  # noqa: TID251 - the SDK's only door to it
