"""Plain HTTP for what the openai client hides: bytes, headers, and connections cut at will."""

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from openai import OpenAI


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response; header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        answer: dict[str, Any] = json.loads(self.body)
        return answer

    @property
    def error(self) -> dict[str, Any]:
        """The OpenAI error object."""
        error: dict[str, Any] = self.json["error"]
        return error


def client_of(base_url: str, retries: int = 0) -> OpenAI:
    """The openai client, without retries unless asked."""
    return OpenAI(base_url=f"{base_url}/v1", api_key="none", max_retries=retries, timeout=120)


def post(url: str, body: object, timeout: float = 120) -> Answer:
    """POSTs JSON, or bytes as they are; GETs when the body is None. Error statuses are answers too."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"})  # noqa: S310 - loopback
    try:
        answer = urllib.request.urlopen(request, timeout=timeout)  # noqa: S310
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        headers = {name.lower(): text for name, text in answer.headers.items()}
        return Answer(answer.status, headers, answer.read())


def open_request(base_url: str, path: str, body: Mapping[str, object]) -> socket.socket:
    """Sends a POST and leaves the connection open, unread: the caller reads, or kills it."""
    where = urlsplit(base_url)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {where.netloc}\r\nContent-Type: application/json\r\n"
    connection = socket.create_connection((where.hostname, where.port), timeout=60)
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection
