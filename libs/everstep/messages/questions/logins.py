"""Questions to logins, the process that signs logins to the bus."""

from everstep.messages.base import Question, Reply


class RenewLogin(Question, frozen=True, kw_only=True, tag="renew_login.v1"):
    """Extend this login. The login's owner asks logins, days before the login expires."""

    token: str
    """The present token (JWT) of the login; without the login's seed it is not secret."""


class LoginRenewed(Reply, frozen=True, kw_only=True, tag="login_renewed.v1"):
    """The same login with a later end."""

    token: str
    """The token to use from now on, with the same seed."""
