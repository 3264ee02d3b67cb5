"""How kvctl's own questions reach an engine: over TCP or a unix socket, with or without TLS, by aiohttp."""

import socket
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from aiohttp.abc import AbstractResolver, ResolveResult

from kvctl.control.certificates import Trust

_LOOPBACK = ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1"))
_IDLE_S = 3.0  # uvicorn drops idle connections after 5 s: drop them first
_UNIX = "unix:"
_AT_SOCKET = "http://localhost"  # the base of URLs, and the Host header, at a unix socket


class LoopbackResolver(AbstractResolver):
    """``localhost`` is both loopback addresses, whatever the hosts file says; other names are looked up."""

    def __init__(self) -> None:
        self._names = aiohttp.ThreadedResolver()

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
    ) -> list[ResolveResult]:
        """Addresses in the order in which they are tried."""
        if host.rstrip(".").lower() != "localhost":
            return await self._names.resolve(host, port, family)
        return [
            ResolveResult(
                hostname=host, host=address, port=port, family=kind, proto=0, flags=socket.AI_NUMERICHOST
            )
            for kind, address in _LOOPBACK
        ]

    async def close(self) -> None:
        """Nothing is held."""
        await self._names.close()


def socket_of(url: str) -> str | None:
    """The path in ``unix:/path``; None for any other address."""
    return "/" + url.removeprefix(_UNIX).lstrip("/") if url.startswith(_UNIX) else None


def base_of(url: str) -> str:
    """The base URL of requests to the engine at ``url``."""
    return url.rstrip("/") if socket_of(url) is None else _AT_SOCKET


def connector_to(url: str, *, limit: int = 0) -> aiohttp.BaseConnector:
    """Connections to the engine at ``url`` alone, ``limit`` at most (0: any number)."""
    path = socket_of(url)
    if path is not None:
        return aiohttp.UnixConnector(path, limit=limit, keepalive_timeout=_IDLE_S)
    return aiohttp.TCPConnector(resolver=LoopbackResolver(), limit=limit, keepalive_timeout=_IDLE_S)


def trusting(url: str, trust: Trust | None) -> dict[str, Any]:
    """Arguments for each request: TLS as it is in force now."""
    if trust is None or urlsplit(url).scheme != "https":
        return {}
    return {"ssl": trust.context, "server_hostname": trust.server_name}
