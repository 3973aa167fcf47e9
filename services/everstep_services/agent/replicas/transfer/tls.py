"""TLS between agents: each shows a certificate of one authority, and requires one.

The names in certificates are not checked: the proof of the job's key covers both certificates, so
nobody between two agents can pass it on.
"""

import hashlib
import logging
import os
import socket
import ssl
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from everstep.errors import EverstepError
from everstep.evidence.files import read_regular
from everstep_services.agent.replicas.settings import CheckpointSettings

log = logging.getLogger(__name__)


class TlsFilesError(EverstepError):
    """The files for TLS are missing, or do not fit each other."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"agents cannot speak TLS with each other: agent.checkpoints.{problem}")


@dataclass(frozen=True, slots=True)
class _Read:
    """The contents of the files."""

    caller: ssl.SSLContext
    holder: ssl.SSLContext
    certificate: bytes


class Tls:
    """The TLS settings from the files, read again whenever the files were replaced."""

    def __init__(self, ca_file: Path, cert_file: Path, key_file: Path) -> None:
        self._files = {"ca_file": ca_file, "cert_file": cert_file, "key_file": key_file}
        self._stamps = self._now()
        self._read = self._again()

    def wrapped(self, wire: socket.socket, *, is_caller: bool) -> tuple[ssl.SSLSocket, bytes]:
        """The same connection before its handshake, and our certificate."""
        stamps = self._now()
        if stamps != self._stamps:
            self._stamps = stamps
            try:
                self._read = self._again()
            except TlsFilesError as error:  # one file may be replaced a moment after the other
                log.warning("tls_files_passed_over error=%s", error)
        read = self._read
        context = read.caller if is_caller else read.holder
        ours = context.wrap_socket(wire, server_side=not is_caller, do_handshake_on_connect=False)
        return ours, read.certificate

    def _again(self) -> _Read:
        for name, path in self._files.items():
            try:
                read_regular(path)
            except OSError as error:
                raise TlsFilesError(f"{name} {path}: {error.strerror}") from error
        caller = self._context(ssl.PROTOCOL_TLS_CLIENT)
        holder = self._context(ssl.PROTOCOL_TLS_SERVER)
        try:
            return _Read(caller, holder, _seen(caller, holder))
        except ssl.SSLError as error:
            raise TlsFilesError(
                f"ca_file {self._files['ca_file']} does not take our own cert_file "
                f"{self._files['cert_file']}: {reason_of(error)}"
            ) from error

    def _context(self, role: int) -> ssl.SSLContext:
        context = ssl.SSLContext(role)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = False
        context.verify_mode = ssl.CERT_REQUIRED
        files = self._files
        try:
            context.load_verify_locations(files["ca_file"])
        except ssl.SSLError as error:
            raise TlsFilesError(
                f"ca_file {files['ca_file']} has no certificate of an authority: {reason_of(error)}"
            ) from error
        try:
            # With a password, so that OpenSSL asks nobody for one.
            context.load_cert_chain(files["cert_file"], files["key_file"], password="")
        except ssl.SSLError as error:
            raise TlsFilesError(
                f"cert_file {files['cert_file']} and key_file {files['key_file']} are not a "
                f"certificate and its key: {reason_of(error)}"
            ) from error
        return context

    def _now(self) -> list[tuple[int, int, int]]:
        stamps = []
        for path in self._files.values():
            with suppress(OSError):  # a failure is raised when the file is read
                about = os.stat(path)
                stamps.append((about.st_ino, about.st_mtime_ns, about.st_size))
        return stamps


def opened_tls(settings: CheckpointSettings) -> Tls | None:
    """The TLS settings; None if TLS is not configured. Blocks on files."""
    ca, cert, key = settings.ca_file, settings.cert_file, settings.key_file
    return None if ca is None or cert is None or key is None else Tls(ca, cert, key)


def fingerprint(caller: bytes, holder: bytes) -> bytes:
    """The hash of both certificates: the same at both ends, unless somebody is between them."""
    return hashlib.sha256(caller).digest() + hashlib.sha256(holder).digest()


def refusal(error: ssl.SSLError) -> str:
    """Why two agents have no TLS in common, and what to do about it."""
    return (
        f"no TLS with it ({reason_of(error)}): give all agents of the job "
        f"agent.checkpoints.ca_file, cert_file and key_file of one authority, or none of them"
    )


def reason_of(error: ssl.SSLError) -> str:
    """The reason in OpenSSL's words."""
    text = getattr(error, "verify_message", "") or error.reason or str(error)
    return text.replace("_", " ").lower()


def _seen(caller: ssl.SSLContext, holder: ssl.SSLContext) -> bytes:
    """Check our own certificate by a handshake; SSLError if others would refuse it."""
    to_caller, to_holder = ssl.MemoryBIO(), ssl.MemoryBIO()
    calling = caller.wrap_bio(to_caller, to_holder)
    holding = holder.wrap_bio(to_holder, to_caller, server_side=True)
    for end in (calling, holding, calling, holding):
        with suppress(ssl.SSLWantReadError):
            end.do_handshake()
    certificate = calling.getpeercert(binary_form=True)
    assert certificate is not None
    return certificate
