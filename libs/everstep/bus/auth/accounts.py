"""The accounts of the bus, and the logins in them, as the server receives them.

    operator ─┬─ SYS          takes new accounts; nobody stays logged in there
              ├─ CONTROL      JetStream, `service`, `admin`; exports what agents need
              └─ job-NAME …   one for each job; imports its own subjects from CONTROL

All keys are derived from the operator's key, so that there is one secret to keep, and an account
that the server has lost is made again as it was. Agents' logins are signed by a key that can do
nothing else: their permissions are in their account, not in their token.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from everstep import subjects
from everstep.bus.auth.keys import Claims, Credentials, Key, KeyKind, claims_of
from everstep.bus.auth.login import read_secret, write_private
from everstep.bus.auth.roles import (
    ADMIN,
    EXPORTS,
    SERVICE,
    Crossings,
    User,
    admin,
    agent,
    crossings,
    job_in,
    service,
)
from everstep.bus.errors import BusConfigError
from everstep.errors import EverstepError
from everstep.ids import checked_name

VALID_S = 7 * 86400
"""How long a login is valid by default."""

_OPERATOR_FILE = "operator.seed"
_JOB_ACCOUNT = "job-"
_SIGNER_FILES = ("agents.seed", "services.seed")
_BOUNDLESS = {
    "subs": -1, "data": -1, "payload": -1, "imports": -1, "exports": -1, "wildcards": True,
    "conn": -1, "leaf": 0,
}  # fmt: skip
_WITH_JETSTREAM = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
_NO_DEFAULTS: dict[str, Any] = {"pub": {}, "sub": {}}


class LoginRefusedError(EverstepError):
    """A login was not renewed, or a job was not admitted."""


class Operator:
    """Makes accounts and logins. Its key allows everything on the bus."""

    def __init__(self, key: Key) -> None:
        self._key = key
        self.system = key.derived(KeyKind.ACCOUNT, "account SYS")
        self.control = key.derived(KeyKind.ACCOUNT, "account CONTROL")
        self._agents = key.derived(KeyKind.ACCOUNT, "logins of agents")
        self._services = key.derived(KeyKind.ACCOUNT, "logins of services")

    @classmethod
    def opened(cls, folder: Path) -> "Operator":
        """The operator whose key is in a folder."""
        path = folder / _OPERATOR_FILE
        if not path.exists():
            raise BusConfigError(
                f"{path} is missing: name the folder with the operator's key, or make one with "
                f"`everstep bus setup`"
            )
        return cls(Key(read_secret(path, "the operator's key")))

    @classmethod
    def made(cls, folder: Path) -> "Operator":
        """As `opened`, but make a new key if the folder has none."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = folder / _OPERATOR_FILE
        if not path.exists():
            write_private(path, Key.new(KeyKind.OPERATOR).seed + "\n", keep=True)
        return cls.opened(folder)

    @property
    def password_of_routes(self) -> str:
        """The password by which the servers of a cluster know each other."""
        return self._key.derived(KeyKind.ACCOUNT, "routes").seed

    @property
    def signers(self) -> "Signers":
        """Return the keys that renew logins, and can do nothing else."""
        return Signers([self._agents, self._services])

    def write_signers(self, folder: Path) -> None:
        """Write the keys that renew logins into a folder, for the service that renews them."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, key in zip(_SIGNER_FILES, (self._agents, self._services), strict=True):
            write_private(folder / name, key.seed + "\n")

    def itself(self) -> str:
        """The token of the operator, which the server trusts."""
        claims = {"type": "operator", "system_account": self.system.public}
        return self._key.signed(self._key.public, "everstep", claims, iat=_now())

    def preloaded(self) -> dict[str, str]:
        """The accounts that every server knows from its start."""
        system = {"limits": _BOUNDLESS, "default_permissions": _NO_DEFAULTS}
        control = {
            "limits": _BOUNDLESS | _WITH_JETSTREAM,
            "default_permissions": _NO_DEFAULTS,
            "exports": _crossing(EXPORTS),
            "signing_keys": [_scope(self._services, SERVICE, service())],
        }
        return {
            self.system.public: self._account(self.system.public, "SYS", system),
            self.control.public: self._account(self.control.public, "CONTROL", control),
        }

    def account_of(self, job: str) -> str:
        """The public key of a job's account."""
        return self._key.derived(KeyKind.ACCOUNT, f"job {checked_name('job', job)}").public

    def job_account(
        self, job: str, *, is_cut_off: bool = False, logins_before: int | None = None
    ) -> str:
        """The token of a job's account.

        With `is_cut_off` the account allows no connection. Logins issued at or before
        `logins_before`, in seconds since 1970, are refused for ever.
        """
        claims = {
            "limits": _BOUNDLESS | {"conn": 0 if is_cut_off else -1},
            "default_permissions": _NO_DEFAULTS,
            "imports": _crossing(crossings(job), self.control.public),
            "signing_keys": [_scope(self._agents, "agent", agent(job))],
        }
        if logins_before is not None:
            claims["revocations"] = {"*": logins_before}
        return self._account(self.account_of(job), f"{_JOB_ACCOUNT}{job}", claims)

    def renewed(self, account: Claims) -> str | None:
        """The token of an account as this release makes it; None if it needs no other.

        Jobs that were cut off stay cut off. An account that is not ours stays as it is.
        """
        job = account.name.removeprefix(_JOB_ACCOUNT)
        if job == account.name:  # of the control plane
            token = self.preloaded().get(account.sub)
        elif account.sub == self.account_of(job):
            token = self.job_account(
                job, is_cut_off=is_cut_off(account), logins_before=logins_before(account)
            )
        else:
            token = None
        return None if token is None or is_same(account, token) else token

    def _account(self, public: str, name: str, claims: dict[str, Any]) -> str:
        return self._key.signed(public, name, {"type": "account", **claims}, iat=_now())

    def login(self, name: str, valid_s: int = VALID_S) -> Credentials:
        """A new login: `admin`, `service`, or `agent-JOB`."""
        job = job_in(name)
        if job is not None:
            return _login(self._agents, self.account_of(job), name, valid_s)
        if name == SERVICE:
            return _login(self._services, self.control.public, name, valid_s)
        if name == ADMIN:
            return _login(self.control, self.control.public, name, valid_s, admin())
        raise BusConfigError(f"{name!r} is not a login: use admin, service, or agent-JOB")

    def signs_as(self, issuer: str) -> bool:
        """Whether this operator's keys include the issuer."""
        return issuer in {self._agents.public, self._services.public, self.control.public}

    def system_login(self) -> Credentials:
        """Return a login, valid for a minute, that may give the server accounts."""
        return _login(self.system, self.system.public, "operator", 60, User((">",), (">",)))


class Signers:
    """Renews logins for clients whose present login is still valid."""

    def __init__(self, keys: Sequence[Key], valid_s: int = VALID_S) -> None:
        self._keys = keys
        self._valid_s = valid_s

    @classmethod
    def opened(cls, folder: Path, valid_s: int) -> "Signers":
        """With the keys in a folder."""
        keys = [Key(read_secret(folder / name, "keys_dir in [logins]")) for name in _SIGNER_FILES]
        return cls(keys, valid_s)

    def valid_for(self, valid_s: int) -> "Signers":
        """Return the same keys, for logins that are valid for `valid_s`."""
        return Signers(self._keys, valid_s)

    def renewed(self, token: str, job: str) -> str:
        """Return the same login with a later end. The server has verified the job.

        `LoginRefusedError` if the login is not ours, or belongs to another job.
        """
        claims = claims_of(token)
        signer = next((key for key in self._keys if claims and key.public == claims.iss), None)
        if claims is None or signer is None or not signer.has_signed(token):
            raise LoginRefusedError("this service does not renew this login")
        if _job_of(claims) != job:
            raise LoginRefusedError(f"the login {claims.name} does not belong to job {job}")
        now = _now()
        if claims.exp and claims.exp <= now:
            raise LoginRefusedError(
                "the login has expired: ask an operator for a new one (`everstep bus login`)"
            )
        # A login that was made for a short time is renewed for a short time.
        valid_s = min(self._valid_s, claims.exp - claims.iat) if claims.exp else self._valid_s
        ends = max(claims.exp, now + valid_s)
        kept = {key: value for key, value in claims.nats.items() if key != "version"}
        return signer.signed(claims.sub, claims.name, kept, iat=now, exp=ends)


def is_cut_off(account: Claims) -> bool:
    """Whether an account allows no connection."""
    return bool(account.nats.get("limits", {}).get("conn") == 0)


def logins_before(account: Claims) -> int | None:
    """Return the time up to which logins of an account are revoked; None if none is."""
    revoked = account.nats.get("revocations", {}).get("*")
    return None if revoked is None else int(revoked)


def is_same(account: Claims, token: str) -> bool:
    """Whether a token describes the account as it already is, apart from the token's time."""
    wanted = claims_of(token)
    return wanted is not None and wanted.nats == account.nats


def _job_of(claims: Claims) -> str:
    return job_in(claims.name) or subjects.CLUSTER


def _login(
    signer: Key, account: str, name: str, valid_s: int, may: User | None = None
) -> Credentials:
    user = Key.new(KeyKind.USER)
    claims: dict[str, Any] = {"type": "user", "issuer_account": account}
    if may is not None:  # other logins have the permissions of their signer's scope
        claims |= _permissions(may)
    now = _now()
    return Credentials(
        signer.signed(user.public, name, claims, iat=now, exp=now + valid_s), user.seed
    )


def _scope(key: Key, role: str, may: User) -> dict[str, Any]:
    return {"kind": "user_scope", "key": key.public, "role": role, "template": _permissions(may)}


def _permissions(may: User) -> dict[str, Any]:
    return {
        "pub": {"allow": list(may.publish)},
        "sub": {"allow": list(may.subscribe)},
        "subs": -1,
        "data": -1,
        "payload": -1,
    }


def _crossing(subjects_: Crossings, account: str | None = None) -> list[dict[str, str]]:
    of = {} if account is None else {"account": account}
    return [
        {"name": subject, "subject": subject, "type": kind, **of}
        for kind, listed in (("service", subjects_.services), ("stream", subjects_.streams))
        for subject in listed
    ]


def _now() -> int:
    return int(datetime.now(UTC).timestamp())
