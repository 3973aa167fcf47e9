"""Everything that can go wrong with the bus, each with its own name.

EverstepError
└── BusError
    ├── BusConfigError        the settings cannot work: URL, files
    ├── BusUnreachableError   no NATS server answers there
    ├── BusDeniedError        the server refused us, or one subject
    │   └── CredentialsExpiredError
    ├── BusTlsError           no common TLS
    ├── ServerTooOldError
    ├── JetStreamOffError
    ├── NoStreamError         a stream or bucket is missing
    ├── NoLeaderError         no server takes messages of a stream or bucket at this moment
    ├── MessageTooLargeError
    ├── TopologyError         the server did not keep what we set
    ├── BusTimeoutError       the server did not answer in time
    ├── BusRefusedError       JetStream refused, with its own code and text
    ├── ConflictError         somebody else wrote first
    ├── DocumentDamagedError
    ├── LeaseLostError
    ├── BlobMissingError
    ├── SpoolError            the local spool of facts
    │   ├── SpoolFullError · SpoolBusyError · SpoolWriteError
    ├── FactsWaitingError     facts are safe on this disk, and not yet in the stream
    └── AskError              a question was not answered, or with an error
        ├── NobodyAnswersError · AskTimeoutError · AskRefusedError
"""

from everstep.errors import EverstepError


class BusError(EverstepError):
    """The root of all errors that `everstep.bus` raises."""


class BusConfigError(BusError):
    """The settings cannot work, whatever the server does."""


class BusUnreachableError(BusError):
    """Nobody answers there, or something that is not a NATS server."""


class BusDeniedError(BusError):
    """The server refused our credentials, or one subject."""


class CredentialsExpiredError(BusDeniedError):
    """The credentials were valid, and have expired."""


class BusTlsError(BusError):
    """TLS with the server failed."""


class ServerTooOldError(BusError):
    """The server lacks features that we rely on: message TTLs, direct gets, atomic batches."""


class JetStreamOffError(BusError):
    """The server runs without JetStream, or not for our account."""


class NoStreamError(BusError):
    """A stream or bucket is missing: never made, or its data were wiped."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name} does not exist on the bus. Make it with `everstep bus init`")
        self.name = name


class NoLeaderError(BusError):
    """Nobody answers for a stream: it has no leader at this moment, or was never made."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"no server answers for {name}: it has no leader while most of its servers are away "
            f"or choose one, or it was never made. See `everstep doctor`, and `everstep bus init`"
        )
        self.name = name


class MessageTooLargeError(BusError):
    """The message exceeds the server's limit; sending it would end the connection."""

    def __init__(self, subject: str, size: int, limit: int) -> None:
        super().__init__(
            f"a message of {size} bytes for {subject} exceeds the bus's limit of {limit}: "
            f"put the content into a blob and send its reference"
        )
        self.size = size
        self.limit = limit


class TopologyError(BusError):
    """The server did not store a stream's configuration as we set it."""


class BusTimeoutError(BusError):
    """The server did not answer in time."""


class BusRefusedError(BusError):
    """JetStream refused a call; `code` is its own error code."""

    def __init__(self, subject: str, code: int, text: str) -> None:
        super().__init__(f"{subject}: the server refused: {text} (code {code})")
        self.code = code


class ConflictError(BusError):
    """The document changed since it was read: read it again and decide again."""

    def __init__(self, key: str, revision: int) -> None:
        super().__init__(f"{key} is no longer at revision {revision}: somebody else wrote it")
        self.key = key
        self.revision = revision


class DocumentDamagedError(BusError):
    """The bytes stored under a document's key cannot be read as a document."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(
            f"the document {name} is damaged: {problem}. Look at it with the `nats` tool, or "
            f"delete it: the service that owns it writes a new one"
        )
        self.name = name


class LeaseLostError(BusError):
    """The lease ran out, or another process took it: stop acting on it."""

    def __init__(self, name: str, token: int) -> None:
        super().__init__(f"the lease {name} with token {token} is no longer ours")
        self.name = name
        self.token = token


class BlobMissingError(BusError):
    """A blob or a part of it is missing, or does not match its hash."""


class SpoolError(BusError):
    """The local spool cannot take or keep facts."""


class SpoolFullError(SpoolError):
    """The spool has reached its limit: the bus has been away for long."""


class SpoolBusyError(SpoolError):
    """Another process uses this spool."""


class SpoolWriteError(SpoolError):
    """The disk did not take a fact."""


class FactsWaitingError(BusError):
    """Facts are safe on our disk, but the stream has not taken them yet."""


class AskError(BusError):
    """A question was not answered, or with an error."""


class NobodyAnswersError(AskError):
    """No replica of the service is running."""


class AskTimeoutError(AskError):
    """A replica may have heard the question, but none answered in time."""


class AskRefusedError(AskError):
    """The service answered with an error; `code` is an HTTP status."""

    def __init__(self, service: str, verb: str, code: str, text: str) -> None:
        super().__init__(f"{service} refused {verb}: {text} (code {code})")
        self.code = code
        self.text = text
