"""TLS on both sides and the engine at a unix socket, through the daemon as a process."""

import asyncio
import contextlib
import re
import shutil
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from kvctl.control.certificates import CertificateError, IdentityFiles, TrustFiles
from tests.proxy.authority import Authority, Pair
from tests.proxy.harness import CHAT, PLAIN, FakeEngine, Wire, get, plain, post
from tests.test_reload import kvctl
from tests.test_serve import MODELS, PAGE, PATIENCE_S, Kvctl, daemon, until


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("authority"), "inner")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")


@pytest.fixture(scope="module")
def engine_pair(authority: Authority) -> Pair:
    return authority.sign("engine.inner")


@pytest.fixture(scope="module")
def port_pair(authority: Authority) -> Pair:
    return authority.sign("localhost")


schemes: list[bytes] = []  # by which the engine was told that the last caller came


async def serving(wire: Wire) -> None:
    """An engine with a metrics page, a model, and one answer."""
    answers = {b"/metrics": PAGE, b"/v1/models": MODELS}
    while True:
        request = await wire.request()
        schemes.extend(request.values(b"x-forwarded-proto"))
        await wire.send(plain(answers.get(request.line.split(b" ")[1], PLAIN)))


def served_by(pair: Pair, asks: Authority | None = None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    if asks is not None:
        context.load_verify_locations(asks.certificate)
        context.verify_mode = ssl.CERT_REQUIRED
    return context


def believing(authority: Authority, shows: Pair | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.certificate)
    if shows is not None:
        context.load_cert_chain(shows.certificate, shows.key)
    return context


async def asked(port: int, context: ssl.SSLContext, request: bytes) -> tuple[bytes, bytes]:
    """The answer, and the serial number of the certificate that was shown."""
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("localhost", port, ssl=context)
        try:
            writer.write(request)
            answer = await reader.read()
            return answer, writer.get_extra_info("peercert")["serialNumber"]
        finally:
            writer.close()


async def until_scraped(it: Kvctl) -> None:
    """The polls get through, and the gate knows the engine."""
    async with asyncio.timeout(PATIENCE_S):
        while 'kvctl_telemetry_up{source="engine_metrics"} 1' not in await it.metrics():  # noqa: ASYNC110 - another process
            await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def engine_at(
    context: ssl.SSLContext | None = None, path: Path | None = None
) -> AsyncIterator[FakeEngine]:
    engine = FakeEngine(serving)
    await (engine.start(ssl=context) if path is None else engine.start_unix(str(path)))
    try:
        yield engine
    finally:
        await engine.stop()


async def refused(port: int, context: ssl.SSLContext) -> bool:
    """Whether nothing is answered: the handshake's refusal may come as an alert, a reset, or an end."""
    try:
        return (await asked(port, context, CLOSING))[0] == b""
    except (ssl.SSLError, ConnectionError):
        return True


CLOSING = post(CHAT, "/v1/chat/completions", b"Connection: close")


async def test_an_https_engine_is_believed_by_its_authority_alone(
    tmp_path: Path, authority: Authority, engine_pair: Pair
) -> None:
    """Requests and polls go over TLS, with kvctl's own certificate where the engine asks for one."""
    async with engine_at(served_by(engine_pair, asks=authority)) as engine:
        url = f"https://127.0.0.1:{engine.port}"
        own = authority.sign("kvctl")
        settings = {
            "ENGINE_CA": str(authority.certificate),
            "ENGINE_SERVER_NAME": "engine.inner",
            "ENGINE_CLIENT_CERTIFICATE": str(own.certificate),
            "ENGINE_CLIENT_KEY": str(own.key),
        }
        async with daemon(tmp_path, url, descriptors=None, **settings) as it:
            await until_scraped(it)
            assert (await it.post()).startswith(b"HTTP/1.1 200 OK")


@pytest.mark.parametrize(
    ("settings", "served"),
    [
        ({"ENGINE_CA": "theirs"}, False),  # another name than the address
        ({"ENGINE_SERVER_NAME": "engine.inner"}, False),  # an authority that the system does not know
        ({"ENGINE_VERIFY": "false"}, True),
        ({"ENGINE_CA": "theirs", "ENGINE_SERVER_NAME": "engine.inner"}, True),
    ],
)
async def test_an_engine_must_prove_its_name(
    tmp_path: Path, authority: Authority, settings: dict[str, str], *, served: bool
) -> None:
    (tmp_path / "pair").mkdir()
    lone = Authority(tmp_path / "pair", "lone").sign("engine.inner")
    theirs = lone.certificate.with_name("lone.pem")
    async with engine_at(served_by(lone)) as engine:
        given = {key: str(theirs) if value == "theirs" else value for key, value in settings.items()}
        async with daemon(tmp_path, f"https://localhost:{engine.port}", descriptors=None, **given) as it:
            if served:
                await until_scraped(it)
                assert (await it.post()).startswith(b"HTTP/1.1 200 OK")
            else:
                await until(lambda: "certificate is not trusted" in it.log.read_text())
                assert (await it.post()).startswith(b"HTTP/1.1 503")
    del authority


async def test_callers_over_tls_and_a_certificate_renewed_by_a_reload(
    tmp_path: Path, authority: Authority, stranger: Authority, port_pair: Pair
) -> None:
    """A reload shows the new certificate to new connections; a broken file changes nothing."""
    async with engine_at() as engine:
        pem, key = tmp_path / "port.pem", tmp_path / "port.key"
        shutil.copy(port_pair.certificate, pem)
        shutil.copy(port_pair.key, key)
        settings = {"TLS_CERTIFICATE": str(pem), "TLS_KEY": str(key)}
        async with daemon(tmp_path, f"http://127.0.0.1:{engine.port}", descriptors=None, **settings) as it:
            context = believing(authority)
            await until_scraped(it)
            answer, serial = await asked(it.port, context, CLOSING)
            proto = schemes[-1:]
            assert answer.startswith(b"HTTP/1.1 200 OK")
            assert proto == [b"https"]
            shown = 'kvctl_tls_certificate_expiry_timestamp_seconds{certificate="listen",engine=""} '
            assert shown in await it.metrics()

            pem.write_text("no certificate")
            status, _, err = await kvctl(tmp_path, "reload")
            assert status == 1
            assert str(pem) in err
            assert (await asked(it.port, context, get("/healthz")))[1] == serial

            renewed = authority.sign("localhost")
            shutil.copy(renewed.certificate, pem)
            shutil.copy(renewed.key, key)
            assert (await kvctl(tmp_path, "reload"))[0] == 0
            answer, other = await asked(it.port, context, get("/healthz"))
            assert answer.startswith(b"HTTP/1.1 200 OK")
            assert other != serial
            with pytest.raises(ssl.SSLCertVerificationError):
                await asked(it.port, believing(stranger), get("/healthz"))


async def test_callers_show_certificates_where_an_authority_is_named(
    tmp_path: Path, authority: Authority, stranger: Authority, port_pair: Pair
) -> None:
    """mTLS: who has no certificate, or a stranger's, gets no answer; the list is read again on a reload."""
    async with engine_at() as engine:
        listed = tmp_path / "callers.pem"
        shutil.copy(authority.certificate, listed)
        settings = {
            "TLS_CERTIFICATE": str(port_pair.certificate),
            "TLS_KEY": str(port_pair.key),
            "TLS_CLIENT_CA": str(listed),
        }
        async with daemon(tmp_path, f"http://127.0.0.1:{engine.port}", descriptors=None, **settings) as it:
            known = believing(authority, shows=authority.sign("caller"))
            foreign = believing(authority, shows=stranger.sign("caller"))
            await until_scraped(it)
            assert (await asked(it.port, known, CLOSING))[0].startswith(b"HTTP/1.1 200 OK")
            for context in (believing(authority), foreign):
                assert await refused(it.port, context)
            shutil.copy(stranger.certificate, listed)
            assert (await kvctl(tmp_path, "reload"))[0] == 0
            assert (await asked(it.port, foreign, CLOSING))[0].startswith(b"HTTP/1.1 200 OK")
            assert await refused(it.port, known)


async def test_who_speaks_no_tls_to_a_tls_port_does_not_fill_the_log(tmp_path: Path, port_pair: Pair) -> None:
    settings = {"TLS_CERTIFICATE": str(port_pair.certificate), "TLS_KEY": str(port_pair.key)}
    async with daemon(tmp_path, "http://127.0.0.1:1", descriptors=None, **settings) as it:
        before = len(it.lines())
        for _ in range(20):
            with contextlib.suppress(ConnectionError):
                assert b"200 OK" not in await it.ask(get("/healthz"))
        assert len(it.lines()) - before < 10


async def test_a_handshake_that_never_comes_is_not_waited_for(tmp_path: Path, port_pair: Pair) -> None:
    settings = {"TLS_CERTIFICATE": str(port_pair.certificate), "TLS_KEY": str(port_pair.key)}
    settings["HEADER_TIMEOUT"] = "200ms"
    async with daemon(tmp_path, "http://127.0.0.1:1", descriptors=None, **settings) as it:
        wire = await it.client()
        await wire.send(b"\x16\x03\x01")
        async with asyncio.timeout(PATIENCE_S):
            with contextlib.suppress(ConnectionError):
                assert await wire.reader.read() == b""
        wire.close()


@pytest.mark.parametrize("spelling", ["unix:{}", "unix://{}", "http+unix://{}"])
async def test_an_engine_at_a_unix_socket(tmp_path: Path, spelling: str) -> None:
    """Requests and polls both go through the socket."""
    path = tmp_path / "engine.sock"
    async with engine_at(path=path):
        shown = str(path).replace("/", "%2F") if spelling.startswith("http") else str(path)
        async with daemon(tmp_path, spelling.format(shown)) as it:
            await until_scraped(it)
            assert (await it.post()).startswith(b"HTTP/1.1 200 OK")
            status, out, _ = await kvctl(tmp_path, "status")
            assert status == 0
            assert "up" in out


@pytest.mark.parametrize("side", ["certificate", "key", "ca"])
def test_files_that_cannot_be_used_are_named(tmp_path: Path, port_pair: Pair, side: str) -> None:
    broken, absent = tmp_path / "broken.pem", tmp_path / "absent.pem"
    broken.write_text("nothing")
    for path, words in ((broken, "broken.pem: "), (absent, "absent.pem: No such file")):
        given = {"certificate": port_pair.certificate, "key": port_pair.key, side: path}
        files = TrustFiles(ca=path) if side == "ca" else IdentityFiles(**given)
        with pytest.raises(CertificateError, match=re.escape(words) if side == "ca" else path.name):
            files.read()


def test_a_key_that_asks_for_a_pass_phrase_is_refused(authority: Authority) -> None:
    pair = authority.sign("locked", pass_phrase="open sesame")
    with pytest.raises(CertificateError, match="encrypted"):
        IdentityFiles(certificate=pair.certificate, key=pair.key).read()
