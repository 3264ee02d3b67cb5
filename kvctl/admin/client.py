"""The admin API from outside: HTTP over the unix socket, standard library only: commands start fast."""

import http.client
import json
import socket
from pathlib import Path
from typing import Any

TIMEOUT_S = 10.0


class ClientError(Exception):
    """A call brought no success. The text is for people."""


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


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("kvctl", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


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

    def post(self, route: str) -> dict[str, Any]:
        """Have something done. Raises ClientError."""
        return self._call("POST", route)

    def _call(
        self, method: str, route: str, body: object = None, if_match: int | None = None
    ) -> dict[str, Any]:
        connection = _UnixConnection(self._path, self._timeout)
        headers = {} if if_match is None else {"If-Match": f'"{if_match}"'}
        payload = None if body is None else json.dumps(body)
        try:
            connection.request(method, route, payload, headers)
            answer = connection.getresponse()
            return _document(answer.status, answer.read())
        except TimeoutError:
            raise TimedOutError(f"{self._path}: no answer within {self._timeout:g} s") from None
        except http.client.HTTPException as error:
            raise ClientError(f"{self._path}: this is no kvctl ({type(error).__name__})") from None
        except OSError as error:
            raise self._unreachable(error) from None
        finally:
            connection.close()

    def _unreachable(self, error: OSError) -> ClientError:
        if isinstance(error, PermissionError):
            return DeniedError(f"{self._path}: {error.strerror}; its group may use it (usually kvctl)")
        hint = "is the daemon running, and is this its socket (--socket, KVCTL_ADMIN_SOCKET)?"
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
