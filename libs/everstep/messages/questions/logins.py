"""What the holder of the keys may be asked about logins to the bus."""

from everstep.messages.base import Question, Reply


class RenewLogin(Question, frozen=True, kw_only=True, tag="renew_login.v1"):
    """Give this login a later end. Whoever is logged in asks logins, days before it expires."""

    token: str
    """The token (JWT) of the login as it is; without its seed it is not secret."""


class LoginRenewed(Reply, frozen=True, kw_only=True, tag="login_renewed.v1"):
    """The same login with a later end."""

    token: str
    """The token to use from now on, with the same seed."""
