"""Who a request comes from: its tenant by API key or by a header that a gateway in front sets.

Keys are compared as digests of digests under a secret of this process: the time of a look-up says nothing
about a key. Where kvctl checks keys, an unknown one is answered 401 in the API's own format; otherwise its
caller belongs to the tenant ``default``, and the engine judges the key.
"""

import hashlib
import hmac
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import replace

from aiohttp import web

from kvctl.core.claim import Shape
from kvctl.proxy.limits import BadRequest

DEFAULT = "default"
PRIORITY_HEADER = "x-kvctl-priority"
PRIORITIES = {"high": -1, "normal": 0, "low": 1}
UNKNOWN_KEY = BadRequest(
    status=401,
    message="This API key is not known here. Nothing was sent to the engine. Send a valid one as "
    "'Authorization: Bearer KEY' or 'x-api-key: KEY'.",
    type="authentication_error",
    param=None,
    code="invalid_api_key",
)


class KeysError(ValueError):
    """A file of keys that cannot be used; the text says where."""


def read_keys(text: str) -> dict[str, str]:
    """Tenant by digest, from a file of keys: one ``SHA-256 [TENANT]`` per line, # begins a comment.

    Raises KeysError.
    """
    keys: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        digest, tenant = words[0].removeprefix("sha256:").lower(), words[1] if len(words) == 2 else DEFAULT
        if len(words) > 2 or len(digest) != 64 or set(digest) - set("0123456789abcdef"):
            raise KeysError(f"line {number} is not 'SHA-256 [TENANT]'")
        keys[digest] = tenant
    return keys


class Tenancy:
    """Names the tenant of each request.

    ``keys`` maps SHA-256 digests to tenants; ``check``: a key that is not among them is refused. ``header``:
    the header in which a gateway in front names the tenant; "": none does. ``known``: the tenants of the
    settings; any other name counts as ``default``.
    """

    def __init__(
        self, keys: Mapping[str, str], *, known: Iterable[str] = (), header: str = "", check: bool = False
    ) -> None:
        self._secret = secrets.token_bytes(32)
        self._tenants = {self._blind(digest): tenant for digest, tenant in keys.items()}
        self._known = frozenset(known)
        self._header = header
        self._check = check
        self._on = bool(keys or header or check or self._known)

    def judge(self, request: web.BaseRequest) -> BadRequest | None:
        """The refusal of an unknown key; None: none is due. Browsers send preflights without a key."""
        if not self._check or request.method == "OPTIONS" or self._by_key(request.headers) is not None:
            return None
        return UNKNOWN_KEY

    def attribute(self, shape: Shape, headers: Mapping[str, str]) -> Shape:
        """The shape with its tenant, and with the priority that a header asks for."""
        word = headers.get(PRIORITY_HEADER)
        if not self._on and word is None:
            return shape
        priority = shape.priority if word is None else PRIORITIES.get(word.strip().lower(), shape.priority)
        return replace(shape, tenant=self.tenant(headers), priority=priority)

    def tenant(self, headers: Mapping[str, str]) -> str:
        """The tenant's name; "" where tenants are not told apart."""
        if not self._on:
            return ""
        named = headers.get(self._header) if self._header else None
        found = named if named is not None else self._by_key(headers)
        return found if found is not None and (found in self._known or found == DEFAULT) else DEFAULT

    def _by_key(self, headers: Mapping[str, str]) -> str | None:
        key = _key_of(headers)
        if key is None:
            return None
        return self._tenants.get(
            self._blind(hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest())
        )

    def _blind(self, digest: str) -> bytes:
        return hmac.digest(self._secret, digest.encode(), "sha256")


def _key_of(headers: Mapping[str, str]) -> str | None:
    scheme, _, key = headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return headers.get("x-api-key") or None
