"""TLS on both sides: which certificates kvctl trusts of an engine, and which it presents to callers.

Files are read at the start and again on a reload, into new contexts: a file that cannot be used changes
nothing. Connections that exist stay as they are; the next one uses what was read last. An engine's
certificate is verified unless the operator says otherwise. A key that needs a pass phrase is refused: nobody
is there to type it.
"""

import logging
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from kvctl import logs
from kvctl.control.expiry import authorities_end, chain_end
from kvctl.settings.errors import SettingsError
from kvctl.settings.model import Settings

log = logs.get("tls")

_ALPN = ["http/1.1"]


class CertificateError(ValueError):
    """Certificate files that cannot be used; the text names them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrustFiles:
    """TLS towards one engine.

    Attributes:
        ca: Authorities that may have signed the engine's certificate; None: those of the system.
        certificate: Chain that kvctl presents to an engine that asks for one; None: none.
        key: The key of that chain; None: it is in the same file.
        server_name: The name that the engine's certificate must bear; None: the one in its address.
        verify: Whether the engine's certificate is verified at all.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    server_name: str | None = None
    verify: bool = True

    def read(self) -> ssl.SSLContext:
        """A context from the files as they are now. Raises CertificateError."""
        try:
            context = ssl.create_default_context(cafile=self.ca)
        except (OSError, ValueError) as error:
            raise CertificateError(f"{self.ca}: {_why(error)}") from None
        context.set_alpn_protocols(_ALPN)
        if not self.verify:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        if self.certificate is not None:
            _load_chain(context, self.certificate, self.key)
        return context


class Trust:
    """TLS towards one engine as new connections use it. Raises CertificateError."""

    __slots__ = ("context", "files")

    def __init__(self, files: TrustFiles | None = None) -> None:
        self.files = files or TrustFiles()
        self.context = self.files.read()

    @property
    def server_name(self) -> str | None:
        """The name that the engine's certificate must bear, where it is not the one in its address."""
        return self.files.server_name


@dataclass(frozen=True, slots=True, kw_only=True)
class IdentityFiles:
    """TLS towards callers: kvctl's chain and key, and the authorities of callers' certificates.

    ``client_ca`` None: callers need none.
    """

    certificate: Path
    key: Path | None = None
    client_ca: Path | None = None

    def read(self) -> ssl.SSLContext:
        """A context from the files as they are now. Raises CertificateError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.set_alpn_protocols(_ALPN)
        _load_chain(context, self.certificate, self.key)
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ValueError) as error:
                raise CertificateError(f"{self.client_ca}: {_why(error)}") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context


class Identity:
    """What listeners present. They keep ``front``; each handshake continues with what was read last."""

    __slots__ = ("_current", "files", "front")

    def __init__(self, files: IdentityFiles) -> None:
        self.files = files
        self.front = files.read()
        self._current = self.front
        self.front.sni_callback = self._choose

    def show(self, fresh: ssl.SSLContext) -> None:
        """Present ``fresh`` to new connections from now on."""
        self._current = fresh

    def _choose(
        self, connection: ssl.SSLSocket | ssl.SSLObject, _name: str | None, _front: ssl.SSLContext
    ) -> None:
        if self._current is not self.front:
            connection.context = self._current


class Certificates:
    """All of the daemon's TLS. A reload reads all of it again, or changes nothing where one file is bad.

    ``identity`` None: callers speak plain HTTP. ``trusts`` has the engines at https addresses, by name.
    ``ends``: when the certificates in force expire, by file and engine (none: the data port's), in Unix time.
    """

    def __init__(
        self, identity: Identity | None = None, trusts: Mapping[str, Trust] = MappingProxyType({})
    ) -> None:
        self.identity = identity
        self.trusts = trusts
        self.ends = self._ends()
        self._fresh: list[Callable[[], None]] = []

    def read(self) -> None:
        """Read the files again; blocks. Raises SettingsError."""
        self._fresh = []
        try:
            fresh = [_replacing(trust, trust.files.read()) for trust in self.trusts.values()]
            if self.identity is not None:
                fresh.append(_showing(self.identity, self.identity.files.read()))
            if fresh:
                fresh.append(self._lasting(self._ends()))
        except CertificateError as error:
            raise SettingsError([str(error)]) from None
        self._fresh = fresh

    def _ends(self) -> Mapping[tuple[str, str], float]:
        found: dict[tuple[str, str], float | None] = {}
        if self.identity is not None:
            files = self.identity.files
            found["listen", ""] = chain_end(files.certificate)
            found["client_ca", ""] = authorities_end(files.client_ca)
        for name, trust in self.trusts.items():
            own = trust.files
            found["engine_client", name] = chain_end(own.certificate)
            found["engine_ca", name] = authorities_end(own.ca)
        return {whose: end for whose, end in found.items() if end is not None}

    def _lasting(self, ends: Mapping[tuple[str, str], float]) -> Callable[[], None]:
        def put_in_force() -> None:
            self.ends = ends

        return put_in_force

    def along_with(self, read: Callable[[], Settings]) -> Callable[[], Settings]:
        """``read``, followed by a reading of these files: a fault in either leaves both as they were."""

        def read_all() -> Settings:
            fresh = read()
            self.read()
            return fresh

        return read_all

    @property
    def front(self) -> ssl.SSLContext | None:
        """What the data port listens with."""
        return None if self.identity is None else self.identity.front

    def adopt(self) -> None:
        """Let new connections use what was read last."""
        for put_in_force in self._fresh:
            put_in_force()
        if self._fresh:
            logs.event(log, logging.INFO, "certificates_read", "certificates and keys were read again")
        self._fresh = []


def _replacing(trust: Trust, context: ssl.SSLContext) -> Callable[[], None]:
    def put_in_force() -> None:
        trust.context = context

    return put_in_force


def _showing(identity: Identity, context: ssl.SSLContext) -> Callable[[], None]:
    return lambda: identity.show(context)


def _load_chain(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    try:
        context.load_cert_chain(certificate, key, password=_no_pass_phrase)
    except (OSError, ValueError) as error:
        named = f"{certificate}" if key is None else f"{certificate} and {key}"
        raise CertificateError(f"{named}: {_why(error)}") from None


def _no_pass_phrase() -> str:
    raise ValueError("the key is encrypted, and nobody is there to type the pass phrase; use one that is not")


def _why(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or "no certificates in it").lower().replace("_", " ")
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
