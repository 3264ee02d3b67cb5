"""The status page before several engines with a queue: on a telephone's width and on a screen."""

import base64
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvctl.admin.client import AdminClient
from tests.ops.chromium import MISSING, PROGRAM, Tab, browser, new_tab
from tests.ops.stage import callers, child
from tests.ports import free_port

pytestmark = pytest.mark.skipif(PROGRAM is None, reason=MISSING)
NAMES = ("chat-a", "chat-b-with-a-name-that-somebody-made-too-long-for-telephones", "chat-c")
WAITING = '[...document.querySelectorAll(".queue")].some((each) => /^[1-9]/.test(each.textContent))'
SETTINGS = """
listen = "127.0.0.1:{port}"
admin_listen = "127.0.0.1:{admin_port}"
admin_socket = "{folder}/admin.sock"
state_dir = "{folder}"
tokenizer = "bound"
gpus = ["none"]
drain_timeout = "0s"
queue_max_wait = "20s"
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The page of a kvctl before three engines, of which callers want more than there is."""
    folder = tmp_path_factory.mktemp("kvctl")
    with ExitStack() as stack:
        engines = ""
        for name in NAMES:
            words = (
                f"-m kvctl.sim --port {free_port()} --with-stdin --blocks 130 --max-model-len 4000".split()
            )
            url = stack.enter_context(child(folder, name, words, r"(http://\S+)"))
            engines += f'\n[[engines]]\nname = "{name}"\nurl = "{url}"\n'
        port, admin_port = free_port(), free_port()
        text = SETTINGS.format(port=port, admin_port=admin_port, folder=folder) + engines
        config = folder / "kvctl.toml"
        config.write_text(text)
        words = ["-m", "kvctl", "serve", f"--config={config}"]
        stack.enter_context(child(folder, "kvctl", words, r"listens on"))
        stack.enter_context(callers(f"http://127.0.0.1:{port}/v1/completions"))
        AdminClient(folder / "admin.sock", 60.0).put(
            "/v1/overrides/margin", {"value": "9%", "ttl_s": 600, "reason": "preemptions since 02:10 " * 8}
        )
        yield f"http://127.0.0.1:{admin_port}"


@pytest.fixture(scope="module")
def browser_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with browser(tmp_path_factory.mktemp("browser")) as port:
        yield port


@pytest.fixture
async def tab(base: str, browser_port: int) -> AsyncIterator[Tab]:
    async with new_tab(browser_port) as made:
        await made.call("Page.navigate", url=base)
        yield made


@pytest.mark.parametrize("width", [400, 1280])
async def test_several_engines_and_a_queue(tab: Tab, width: int, tmp_path: Path) -> None:
    """Every engine has its figures and nothing is wider than the screen, also while somebody waits."""
    await tab.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
    )
    await tab.until(f'document.querySelectorAll(".engine").length === {len(NAMES)}')
    shown = await tab.value('[...document.querySelectorAll("h2 .name")].map((each) => each.textContent)')
    assert sorted(shown) == sorted(NAMES)
    await tab.until(WAITING)
    assert await tab.value("document.documentElement.scrollWidth <= window.innerWidth")
    cut = await tab.value(
        '[...document.querySelectorAll("dd, .badge, li")].filter((e) => e.scrollWidth > e.clientWidth + 1)'
        ".map((e) => e.textContent)"
    )
    assert cut == []
    await tab.until(
        'document.getElementById("sentence").textContent.startsWith("3 of 3 engines up; headroom ")'
    )
    badges = await tab.value('[...document.querySelectorAll(".moved")].map((e) => [e.hidden, e.textContent])')
    assert [(hidden, text[:4]) for hidden, text in badges] == [(False, "for ")] * len(NAMES)
    assert "margin = 9.0 %" in await tab.value('document.getElementById("overrides").textContent')
    assert "preemptions since" in await tab.value('document.getElementById("overrides").textContent')
    assert tab.complaints == []
    picture = await tab.call("Page.captureScreenshot", captureBeyondViewport=True)
    folder = Path(os.environ.get("PAGE_PICTURES", tmp_path))
    (folder / f"several-{width}.png").write_bytes(base64.b64decode(picture["data"]))
