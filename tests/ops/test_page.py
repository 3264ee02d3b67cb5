"""The status page: its routes, and what a browser makes of it in front of a loaded kvctl."""

import asyncio
import base64
import json
import os
import re
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from kvctl.core.events import Reject
from kvctl.core.outcomes import Limit, RejectReason
from kvctl.web import document
from kvctl.web.live import MOST_LOOKING
from kvctl.web.recent import Recent
from tests.admin.conftest import Stand
from tests.ops.chromium import MISSING, PROGRAM, Tab, browser, new_tab
from tests.ops.stage import loaded_kvctl

needs_chromium = pytest.mark.skipif(PROGRAM is None, reason=MISSING)
WIDTHS, SCHEMES = (1280, 400), ("light", "dark")
PATIENCE_S = 60.0

# the ratio by which WCAG measures contrast, of every text that is seen, where it is least
CONTRAST = """
(() => {
  const channel = (c) => { c /= 255; return c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const light = ([r, g, b]) => 0.2126 * channel(r) + 0.7152 * channel(g) + 0.0722 * channel(b);
  const parts = (color) => color.match(/[\\d.]+/g).map(Number);
  const paper = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const found = parts(getComputedStyle(at).backgroundColor);
      if (found.length < 4 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const worst = { ratio: 99, text: "" };
  for (const node of document.querySelectorAll("body *")) {
    const own = [...node.childNodes].filter((each) => each.nodeType === 3 && each.textContent.trim());
    if (!own.length || !node.getClientRects().length) continue;
    const [a, b] = [light(parts(getComputedStyle(node).color)), light(paper(node))];
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < worst.ratio) Object.assign(worst, { ratio, text: node.textContent.trim().slice(0, 40) });
  }
  return worst;
})()
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The admin listener of a loaded kvctl."""
    with loaded_kvctl(tmp_path_factory.mktemp("kvctl")) as metrics:
        yield metrics.removesuffix("/metrics")


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PATIENCE_S)) as made:
        yield made


@pytest.fixture(scope="module")
def browser_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    with browser(tmp_path_factory.mktemp("browser")) as port:
        yield port


@pytest.fixture
async def tab(base: str, browser_port: int) -> AsyncIterator[Tab]:
    """The page, with numbers and refusals on it."""
    async with new_tab(browser_port) as made:
        await made.call("Page.navigate", url=f"{base}/")
        await made.until('document.getElementById("connection")?.textContent === "live"')
        await made.until('document.querySelectorAll("#refusals td").length > 1')
        yield made


# --- the routes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["/", "/page.js", "/page.css", "/icon.svg"])
async def test_a_file_is_served_with_its_policy(base: str, session: aiohttp.ClientSession, path: str) -> None:
    async with session.get(base + path) as answer:
        assert answer.status == 200
        policy = answer.headers["Content-Security-Policy"]
        tag = answer.headers["ETag"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    async with session.get(base + path, headers={"If-None-Match": tag}) as again:
        assert (again.status, await again.read()) == (304, b"")


async def test_the_page_has_no_inline_script_or_style_and_fetches_nothing_outside(
    base: str, session: aiohttp.ClientSession
) -> None:
    async with session.get(base + "/") as answer:
        text = await answer.text()
    assert not re.search(r"<script(?![^>]*\ssrc=)|<style|\sstyle=|\son\w+=|https?://", text)
    async with session.get(base + "/page.js") as answer:
        script = await answer.text()
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|\.style\b", script)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH"])
@pytest.mark.parametrize("path", ["/", "/v1/page", "/v1/page/events"])
async def test_nothing_changes_over_tcp(
    base: str, session: aiohttp.ClientSession, method: str, path: str
) -> None:
    async with session.request(method, base + path, data=b"{}") as answer:
        assert answer.status == 405


async def test_the_document(base: str, session: aiohttp.ClientSession) -> None:
    shown: dict[str, Any] = {"refusals": []}
    engine: dict[str, Any] = {"ranks": []}
    async with asyncio.timeout(PATIENCE_S):
        while not (shown["refusals"] and engine["ranks"]):  # some are refused before its page is read
            async with session.get(base + "/v1/page") as answer:
                shown = await answer.json()
            (engine,) = shown["engines"].values()
    assert engine["capacity_tokens"] >= engine["budget_tokens"] > 0
    assert [rank["rank"] for rank in engine["ranks"]] == ["0"]
    newest = shown["refusals"][0]
    assert newest["reason"] in shown["refused_last_minute"]
    assert 0 <= shown["time"] - newest["at"] < PATIENCE_S
    assert "word word" not in json.dumps(shown)


def test_what_was_refused_since_the_state_was_read_is_not_of_the_future() -> None:
    """The page's state is read once for all who ask; refusals go on meanwhile."""
    now = 105.0
    recent = Recent(lambda: now)
    refused = Reject(request_id="r", reason=RejectReason.KV_BUDGET, needed_tokens=9, prompt_tokens=5)
    recent.observe("e", refused)
    status, now = Stand().status(), 107.0
    assert status.now == 100.0
    shown = document.page(status, {"active": {}, "drains": {}}, recent, wall=1000.0)
    assert (shown["time"], shown["refusals"][0]["at"]) == (1000.0, 998.0)


async def events(answer: aiohttp.ClientResponse, most: int) -> list[tuple[str, dict[str, Any]]]:
    found: list[tuple[str, dict[str, Any]]] = []
    name = ""
    while len(found) < most:
        line = (await answer.content.readline()).decode()
        if line.startswith("event: "):
            name = line[7:].strip()
        elif line.startswith("data: "):
            found.append((name, json.loads(line[6:])))
    return found


async def test_the_stream_begins_with_the_past_and_goes_on(base: str, session: aiohttp.ClientSession) -> None:
    async with session.get(base + "/v1/page/events") as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        told = await events(answer, 4)
    assert [name for name, _ in told] == ["history", "state", "state", "state"]
    times = [state["time"] for _, state in told[1:]]
    assert times == sorted(set(times))
    assert set(told[0][1]) == set(told[1][1]["engines"])


async def test_streams_are_bounded_and_come_free_again(base: str) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as many:
        held = [await many.get(base + "/v1/page/events") for _ in range(MOST_LOOKING + 1)]
        assert held[0].status == 200
        assert held[-1].status == 503
        assert held[-1].headers["Retry-After"]
        for each in held:
            each.close()
        again = await many.get(base + "/v1/page/events")
        async with asyncio.timeout(PATIENCE_S):
            while again.status != 200:  # the end of a stream is seen when the next event is written
                await asyncio.sleep(0.1)
                again = await many.get(base + "/v1/page/events")
        again.close()


# --- in a browser ------------------------------------------------------------------------------------


@needs_chromium
async def test_it_is_live_and_nobody_complains(tab: Tab) -> None:
    first = await tab.value('document.querySelector(".chart .used").getAttribute("d")')
    await tab.until(f'document.querySelector(".chart .used").getAttribute("d") !== {json.dumps(first)}')
    figures = await tab.value('[...document.querySelectorAll(".figures dd")].map((each) => each.textContent)')
    assert len(figures) == 9
    assert not set(figures) & {"", "undefined", "NaN"}
    assert await tab.value('document.querySelector(".moved").hidden')  # nothing is overridden
    assert tab.complaints == []


@needs_chromium
async def test_reasons_are_the_words_of_the_metrics(tab: Tab) -> None:
    words = await tab.value(
        '[...document.querySelectorAll("#refusals td:nth-child(2)")].map((each) => each.textContent)'
    )
    assert words
    assert set(words) <= set(RejectReason)
    assert await tab.value('document.querySelector(".limit").textContent') in set(Limit)
    bars = await tab.value('[...document.querySelectorAll("#reasons li")].map((each) => each.textContent)')
    assert {bar.split(":")[0] for bar in bars} <= set(RejectReason)


@needs_chromium
@pytest.mark.parametrize(("width", "rows"), [(1280, 1), (1000, 3), (400, 3)])
async def test_no_figure_stands_alone(tab: Tab, width: int, rows: int) -> None:
    await tab.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
    )
    tops = await tab.value(
        '[...document.querySelectorAll(".figures div")].map((each) => each.getBoundingClientRect().top)'
    )
    assert sorted(Counter(tops).values()) == [9 // rows] * rows


@needs_chromium
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
async def test_it_is_read_at_every_width_and_in_both_schemes(
    tab: Tab, width: int, scheme: str, tmp_path: Path
) -> None:
    await tab.call(
        "Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=width < 600
    )
    await tab.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    assert await tab.value("document.documentElement.scrollWidth <= window.innerWidth")
    worst = await tab.value(CONTRAST)
    assert worst["ratio"] >= 4.5, worst
    paper = await tab.value("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    picture = await tab.call("Page.captureScreenshot", captureBeyondViewport=True)
    folder = Path(os.environ.get("PAGE_PICTURES", tmp_path))
    (folder / f"page-{width}-{scheme}.png").write_bytes(base64.b64decode(picture["data"]))


@needs_chromium
async def test_it_is_used_by_keyboard(tab: Tab) -> None:
    found = []
    for _ in range(4):
        await tab.press("Tab")
        found.append(
            await tab.value(
                "(({ id, className, tagName }) => id || className || tagName)(document.activeElement)"
            )
        )
        visible = await tab.value('getComputedStyle(document.activeElement).outlineStyle !== "none"')
        assert visible, found
    assert found == ["skip", "pause", "scroll", "scroll"]
    await tab.value('document.getElementById("pause").focus()')
    await tab.press("Enter")
    assert await tab.value('document.getElementById("pause").getAttribute("aria-pressed")') == "true"
    await tab.until('document.getElementById("connection").textContent === "paused"')
    sentence = await tab.value('document.querySelector(".chart .used").getAttribute("d")')
    await asyncio.sleep(2.5)
    assert await tab.value('document.querySelector(".chart .used").getAttribute("d")') == sentence


@needs_chromium
async def test_a_screen_reader_finds_its_way(tab: Tab) -> None:
    nodes = (await tab.call("Accessibility.getFullAXTree"))["nodes"]
    roles = [node["role"]["value"] for node in nodes if not node["ignored"]]
    assert {"banner", "main", "contentinfo", "table", "columnheader", "status"} <= set(roles)
    named = {
        (node["role"]["value"], node.get("name", {}).get("value", ""))
        for node in nodes
        if not node["ignored"]
    }
    assert ("region", "Last refusals") in named
    chart = next(name for role, name in named if role in ("image", "img") and "Budget" in name)
    assert re.match(
        r"Budget [\d,]+, forecast peak [\d,]+, in use ([\d,]+|\?), capacity [\d,]+ KV tokens", chart
    )
    buttons = [name for role, name in named if role == "button"]
    assert buttons == ["Pause"]
    levels = await tab.value('[...document.querySelectorAll("h1, h2, h3")].map((each) => each.tagName)')
    assert levels[0] == "H1"
    assert set(levels[1:]) == {"H2"}
