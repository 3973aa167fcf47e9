"""Logins that end soon, and are renewed long before: no test waits for half of their time."""

import time
from unittest.mock import patch

from everstep.bus.auth import accounts
from everstep.bus.auth.accounts import Operator
from everstep.bus.auth.keys import Credentials

_PASSED = 4
"""Of five parts of its time so many have passed: its holder renews it at once."""


def aged_login(operator: Operator, name: str, left_s: int) -> Credentials:
    """A login that is due to be renewed, and ends after `left_s`."""
    issued = int(time.time()) - _PASSED * left_s
    with patch.object(accounts, "_now", lambda: issued):
        return operator.login(name, (_PASSED + 1) * left_s)
