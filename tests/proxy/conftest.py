import asyncio
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import uvloop


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Whatever moves bytes holds on both loops; the rest of the tests run on the plain one."""
    del config
    plain = {"asyncio": asyncio.new_event_loop}
    moves_bytes = item.path.stem in (
        "test_relay",
        "test_faults",
        "test_pool",
        "test_server",
        "test_drain",
        "test_churn",
    )
    return {**plain, "uvloop": uvloop.new_event_loop} if moves_bytes else plain


@pytest.fixture(scope="session")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for localhost, of nobody's authority."""
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes",
         "-days", "2", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost",
         "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key
