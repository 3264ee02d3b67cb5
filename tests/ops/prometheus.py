"""A real Prometheus that scrapes one page, and the queries that Grafana would send it."""

import contextlib
import json
import shutil
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.ports import free_port

PROGRAM = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")
MISSING = "Prometheus is not installed (Debian package prometheus)"
_CONFIG = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: {rules}
scrape_configs:
"""
_JOB = """
  - job_name: {job}
    metrics_path: {path}
    static_configs: [{{targets: ["{target}"]}}]
"""
RATE = "30s"  # long: on a busy machine many a scrape comes too late


def expand(expr: str, job: str) -> str:
    """A dashboard's query as Grafana sends it: ``job`` chosen, the other variables at "All"."""
    values = {"$job": job, "$instance": ".*", "$engine": ".*", "$__rate_interval": RATE}
    for name, value in values.items():
        expr = expr.replace(name, value)
    return expr


def fetch(url: str) -> bytes:
    """The body of a page on loopback."""
    with urllib.request.urlopen(url, timeout=30) as response:  # noqa: S310 - loopback
        body: bytes = response.read()
    return body


class Prometheus:
    """One running server."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._at: dict[str, str] = {}

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The series of an instant query. Raises HTTPError for a query that does not parse."""
        answer = self._get("/api/v1/query", query=expr, **self._at)
        result: list[dict[str, Any]] = answer["data"]["result"]
        return result

    def stop_at(self, ready: Callable[[], bool]) -> None:
        """All later queries are of one moment at which ``ready`` held: no later scrape hides anything."""

        def now() -> bool:
            self._at = {"time": repr(time.time())}
            return ready()

        self.wait(now)

    def firing(self) -> dict[str, dict[str, Any]]:
        """The alerts that fire now, by name."""
        alerts = self._get("/api/v1/alerts")["data"]["alerts"]
        return {each["labels"]["alertname"]: each for each in alerts if each["state"] == "firing"}

    def targets(self) -> list[dict[str, Any]]:
        """How the scraping goes."""
        targets: list[dict[str, Any]] = self._get("/api/v1/targets")["data"]["activeTargets"]
        return targets

    def wait(self, ready: Callable[[], bool], seconds: float = 120.0) -> None:
        """Return when ``ready``; raises TimeoutError."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if ready():
                    return
            time.sleep(0.05)
        raise TimeoutError("Prometheus did not get there")

    def _get(self, path: str, **arguments: str) -> dict[str, Any]:
        query = urllib.parse.urlencode(arguments)
        answer: dict[str, Any] = json.loads(fetch(f"{self._base}{path}?{query}"))
        return answer


@contextlib.contextmanager
def scraping(pages: Mapping[str, str], folder: Path, rules: Sequence[Path] = ()) -> Iterator[Prometheus]:
    """A Prometheus that scrapes ``pages`` (URL by job), ready when it has scraped often enough for rates."""
    config = folder / "prometheus.yml"
    head = _CONFIG.format(rules=json.dumps([str(path) for path in rules]))
    config.write_text(head + "".join(_job(job, url) for job, url in pages.items()))
    port = free_port()
    command = [
        str(PROGRAM),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=error",
    ]
    with (folder / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            server = Prometheus(f"http://127.0.0.1:{port}")
            often = f"count_over_time(kvctl_build_info[{RATE}]) >= 2"
            server.wait(lambda: len(server.query(often)) == len(pages))
            yield server
        finally:
            process.terminate()
            process.wait(60)


@contextlib.contextmanager
def serving(page: Callable[[], bytes], content_type: str) -> Iterator[str]:
    """The URL of a page that is made anew for each request."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = page()
            self.send_response(200)
            self.send_header("Content-Type", content_type)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/metrics"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _job(name: str, url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return _JOB.format(job=name, path=parts.path, target=parts.netloc)
