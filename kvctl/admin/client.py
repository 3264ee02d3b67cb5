"""The admin API's client: HTTP over the unix socket, with few imports so that commands start fast."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kvctl.admin.wire import Exchange, WireError

TIMEOUT_S = 10.0
_HANGS = "the daemon hangs or is very busy: a longer --timeout, else systemctl status kvctl"
_UNKNOWN = "whether it was done is not known (kvctl status, kvctl overrides)"
_MEANS = {"GET": _HANGS, **dict.fromkeys(("PUT", "POST", "DELETE"), f"{_UNKNOWN}; {_HANGS}")}
_NO_HEADERS: Mapping[str, str] = MappingProxyType({})


class ClientError(Exception):
    """A call failed. The text is for people."""


class UnreachableError(ClientError):
    """No daemon answers at the socket."""


class DeniedError(ClientError):
    """The socket does not let this user in."""


class TimedOutError(ClientError):
    """The daemon took the call and did not answer in time."""


class RefusedError(ClientError):
    """The daemon said no; ``code`` is its word, ``status`` the HTTP status."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


class AdminClient:
    """One daemon's admin API. Every call is a connection of its own."""

    def __init__(self, path: Path, timeout: float = TIMEOUT_S) -> None:
        """``timeout`` in seconds holds for each step of a call."""
        self._path = path
        self._timeout = timeout

    def get(self, route: str) -> dict[str, Any]:
        """A document. Raises ClientError."""
        return self._call("GET", route)

    def put(self, route: str, body: object, if_match: int | None = None) -> dict[str, Any]:
        """Set something. Raises ClientError."""
        return self._call("PUT", route, body, if_match)

    def delete(self, route: str, if_match: int | None = None) -> dict[str, Any]:
        """Take something away. Raises ClientError."""
        return self._call("DELETE", route, None, if_match)

    def post(self, route: str, body: object = None) -> dict[str, Any]:
        """Ask for an action. Raises ClientError."""
        return self._call("POST", route, body)

    def text(self, route: str) -> str:
        """A page that is not JSON. Raises ClientError."""
        with self._asked("GET", route) as answer:
            payload = answer.read()
            if answer.status >= 400:
                _document(answer.status, payload)
            return payload.decode(errors="replace")

    def lines(self, route: str) -> Iterator[dict[str, Any]]:
        """The objects of a stream as they come, until it ends. Raises ClientError."""
        with self._asked("GET", route) as answer:
            if answer.status >= 400:
                _document(answer.status, answer.read())
            while line := answer.readline():
                yield json.loads(line)

    def _call(
        self, method: str, route: str, body: object = None, if_match: int | None = None
    ) -> dict[str, Any]:
        headers = {} if if_match is None else {"If-Match": f'"{if_match}"'}
        payload = b"" if body is None else json.dumps(body).encode()
        with self._asked(method, route, payload, headers) as answer:
            return _document(answer.status, answer.read())

    @contextmanager
    def _asked(
        self, method: str, route: str, payload: bytes = b"", headers: Mapping[str, str] = _NO_HEADERS
    ) -> Iterator[Exchange]:
        """An exchange, closed afterwards; its failures become ClientError with a hint."""
        try:
            with Exchange(self._path, self._timeout, method, route, body=payload, headers=headers) as answer:
                yield answer
        except TimeoutError:
            raise TimedOutError(
                f"{self._path}: no answer within {self._timeout:g} s; {_MEANS[method]}"
            ) from None
        except (WireError, ValueError) as error:  # JSON that is none is a ValueError
            raise ClientError(f"{self._path}: this is no kvctl ({type(error).__name__})") from None
        except OSError as error:
            raise self._unreachable(error) from None

    def _unreachable(self, error: OSError) -> ClientError:
        if isinstance(error, PermissionError):
            hint = "its group may use it (usually kvctl): sudo, or join the group"
            return DeniedError(f"{self._path}: {error.strerror}; {hint}")
        hint = "is the daemon running (systemctl status kvctl), and is this its socket (--socket)?"
        return UnreachableError(f"{self._path}: {error.strerror or error}; {hint}")


def _document(status: int, payload: bytes) -> dict[str, Any]:
    try:
        document = json.loads(payload)
    except ValueError:
        raise ClientError(f"the answer is no JSON (status {status})") from None
    if not isinstance(document, dict):
        raise ClientError(f"the answer is no object (status {status})")
    if status < 400:
        return document
    error = document.get("error", {})
    raise RefusedError(status, str(error.get("code", "")), str(error.get("message", f"status {status}")))
