"""A real HAProxy with agent-check in front of three boxes whose headroom differs."""

import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fleet.boxes import Answer, Box, ask, binary, eventually, running, small
from tests.ports import free_port

HAPROXY = binary("haproxy")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(HAPROXY is None, reason="no haproxy on this machine")]

BUDGET = 32_000
TAKEN = (0, 9_600, 19_200)  # of BUDGET: headroom 100 %, 70 %, 40 %
SESSIONS = 420

CONFIG = """\
global
  stats socket {folder}/stats.sock mode 600 level admin
defaults
  mode http
  timeout connect 60s
  timeout check 60s
  timeout client 120s
  timeout server 120s
frontend llm
  bind 127.0.0.1:{port}
  default_backend boxes
backend boxes
  balance roundrobin
  option httpchk GET /readyz
  http-check expect status 200
  default-server weight 100 check inter 300ms fall 2 rise 1 agent-check agent-inter 100ms
{servers}
"""


class Front:
    """HAProxy on ``url``."""

    def __init__(self, folder: Path, boxes: list[Box]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.folder = folder
        servers = "\n".join(
            f"  server box{number} 127.0.0.1:{box.port} agent-port {box.agent_port}"
            for number, box in enumerate(boxes)
        )
        self.config = folder / "haproxy.cfg"
        self.config.write_text(CONFIG.format(folder=folder, port=self.port, servers=servers))

    def said(self, command: str) -> str:
        with socket.socket(socket.AF_UNIX) as stats:
            stats.connect(str(self.folder / "stats.sock"))
            stats.sendall(command.encode() + b"\n")
            return b"".join(iter(lambda: stats.recv(65536), b"")).decode()

    def column(self, name: str) -> dict[str, str]:
        """One column of HAProxy's own statistics, by server."""
        head, *rows = [line.split(",") for line in self.said("show stat").lstrip("# ").splitlines() if line]
        server, wanted = head.index("svname"), head.index(name)
        return {row[server]: row[wanted] for row in rows if row[server].startswith("box")}

    def sessions(self) -> list[int]:
        return [int(total) for _, total in sorted(self.column("stot").items())]


@pytest.fixture(scope="module")
def boxes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Box]]:
    folder = tmp_path_factory.mktemp("boxes")
    made = [Box(folder / f"box{number}", taken) for number, taken in enumerate(TAKEN)]
    with made[0], made[1], made[2]:
        yield made


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory, boxes: list[Box]) -> Iterator[Front]:
    made = Front(tmp_path_factory.mktemp("haproxy"), boxes)
    assert HAPROXY is not None
    with running([HAPROXY, "-f", str(made.config)], {}, made.folder / "log"):
        eventually(lambda: set(made.column("status").values()) == {"UP"}, "every box is up")
        yield made


def send(url: str, count: int) -> list[Answer]:
    with ThreadPoolExecutor(8) as threads:
        return list(threads.map(lambda _: ask(url + "/v1/completions", small()), range(count)))


def test_sessions_follow_headroom(front: Front) -> None:
    eventually(lambda: front.column("weight")["box2"] == "40", "the agents have set the weights")
    before = front.sessions()
    answers = send(front.url, SESSIONS)
    assert {answer.status for answer in answers} == {200}
    shares = [(now - then) / SESSIONS for now, then in zip(front.sessions(), before, strict=True)]
    free = [BUDGET - taken for taken in TAKEN]
    for share, tokens in zip(shares, free, strict=True):
        assert share == pytest.approx(tokens / sum(free), rel=0.1)


def test_a_refusal_marks_nobody_down(front: Front, boxes: list[Box]) -> None:
    large = small(max_tokens=25_000)  # more than what two of the boxes have left
    assert [ask(box.url + "/v1/completions", large).status for box in boxes[1:]] == [429, 429]
    seen = {ask(front.url + "/v1/completions", large | {"prompt": [5] * 6000}).status for _ in range(6)}
    assert 429 in seen, "and HAProxy passes it on"
    assert set(front.column("status").values()) == {"UP"}
    assert send(front.url, 3)[-1].status == 200


def test_a_drained_box_gets_nothing_new(front: Front, boxes: list[Box]) -> None:
    boxes[0].command("drain")
    try:
        eventually(lambda: "DRAIN" in front.column("status")["box0"], "HAProxy sees the drain")
        before = front.sessions()
        assert {answer.status for answer in send(front.url, 30)} == {200}
        assert front.sessions()[0] == before[0]
    finally:
        boxes[0].command("undrain")
    eventually(lambda: front.column("status")["box0"] == "UP", "it is back")
    before = front.sessions()
    send(front.url, 30)
    assert front.sessions()[0] > before[0]
