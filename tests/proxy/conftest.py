import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path

import pytest
import uvloop

from kvctl.engines.vllm import VLLM
from kvctl.proxy.bodies import Reader
from kvctl.tokens.chain import ChainCounter
from kvctl.tokens.load import load_counter
from tests.steady import SteadyLoop
from tests.tokens.tiny import write


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Whatever moves bytes holds on both loops; the rest of the tests run on the steady one."""
    del config
    plain: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": SteadyLoop}
    moves_bytes = item.path.stem in (
        "test_relay",
        "test_faults",
        "test_pool",
        "test_server",
        "test_drain",
        "test_churn",
        "test_express",
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


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's tokenizer and template."""
    return write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
async def tiny_counter(tiny_folder: Path) -> AsyncIterator[ChainCounter]:
    """Counts with that model's own files."""
    counter = load_counter(str(tiny_folder))
    yield counter
    await counter.close()


@pytest.fixture
def tiny_reader(tiny_counter: ChainCounter) -> Reader:
    """Reads bodies as before a vLLM with a context of 8,192 tokens."""
    return Reader(tiny_counter, VLLM(), vocab_size=tiny_counter.vocab_size, context=lambda: 8192)
