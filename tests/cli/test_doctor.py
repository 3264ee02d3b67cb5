"""``kvctl doctor`` as a process of its own, before a simulated engine over real HTTP."""

import json
import re
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from kvctl.cli.doctor_daemon import settings_of
from kvctl.settings.document import as_document
from kvctl.settings.loading import load
from kvctl.sim.profiles import PROFILES
from kvctl.sim.scheduler import EngineConfig
from kvctl.sim.server import SimServer
from tests.cli.conftest import Daemon, Done, Kvctl
from tests.plan.configs import LLAMA3_8B
from tests.tokens.tiny import write

CHECKS = [
    "settings", "engine", "metrics", "tokenizer", "capacity", "gpu", "state_dir", "admin_socket",
    "descriptors", "clock", "daemon",
]  # fmt: skip

NO_SOCKET = {"KVCTL_ADMIN_SOCKET": ""}


@pytest.fixture
async def engine() -> AsyncIterator[SimServer]:
    server = SimServer(EngineConfig(profile=PROFILES["1.5b-shared"], blocks=1000, block_size=16))
    await server.start()
    yield server
    await server.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA3_8B), encoding="utf-8")
    return folder


class Doctor:
    """Runs the command; ``found`` is its JSON by check."""

    def __init__(self, kvctl: Kvctl, folder: Path) -> None:
        self._kvctl, self._folder = kvctl, folder

    async def __call__(self, url: str, *arguments: str, **settings: str) -> Done:
        given = {"ENGINE_URL": url, "STATE_DIR": str(self._folder), "GPUS": "none", **settings}
        return await self._kvctl(
            "doctor", *arguments, **{f"KVCTL_{key}": text for key, text in given.items()}
        )

    async def found(self, url: str, status: int, **settings: str) -> Mapping[str, Mapping[str, Any]]:
        done = await self(url, "-o", "json", **settings)
        assert (done.status, done.err) == (status, "")
        document = json.loads(done.out)
        assert document["ok"] is (status == 0)
        for each in document["checks"]:
            assert each["result"] == "pass" or each["remedy"], each
        return {each["check"]: each for each in document["checks"]}


@pytest.fixture
def doctor(kvctl: Kvctl, tmp_path: Path) -> Doctor:
    return Doctor(kvctl, tmp_path)


async def test_all_is_well_before_a_good_engine(doctor: Doctor, engine: SimServer) -> None:
    found = await doctor.found(engine.url, 0)
    assert list(found) == CHECKS
    assert found["engine"]["found"] == "sim, context 8,192 tokens"
    assert found["metrics"]["found"] == "1 rank, usage gauge vllm:kv_cache_usage_perc (new name)"
    assert found["tokenizer"]["found"].startswith('the engine counts: "The quick brown fox ..." is ')
    assert "15,984 KV tokens; not compared" in found["capacity"]["found"]
    assert found["daemon"]["result"] == "warn"


async def test_the_table_has_a_line_a_check_and_the_remedies(doctor: Doctor, engine: SimServer) -> None:
    done = await doctor(engine.url, TOKENIZER="bound")
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert [line.split()[0] for line in lines if line and line[0].isalpha()] == CHECKS
    assert any(line.startswith("    -> set tokenizer to the model's folder") for line in lines)
    assert lines[-1].startswith("11 checks: 0 failed, ")


HOSTILE = "m\x1b[2J\x1b]0;owned\x07\u202eb\nc"


async def test_an_engines_words_do_not_touch_the_terminal(doctor: Doctor) -> None:
    """Model, version and label values are the engine's; they reach the screen written out."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": HOSTILE, "max_model_len": 4096, "owned_by": HOSTILE}]})

    async def version(_: web.Request) -> web.Response:
        return web.json_response({"version": HOSTILE})

    async def metrics(_: web.Request) -> web.Response:
        written = HOSTILE.replace("\n", "\\n")
        names = (f'engine="0",model_name="{written}"', f'engine="{written}",model_name="{written}"')
        lines = [f"vllm:kv_cache_usage_perc{{{each}}} 0.5" for each in names]
        lines.append(f'vllm:cache_config_info{{block_size="{written}",num_gpu_blocks="x"}} 1')
        return web.Response(text="\n".join([*lines, ""]))

    app = web.Application()
    app.add_routes(
        [web.get("/v1/models", models), web.get("/version", version), web.get("/metrics", metrics)]
    )
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        host, port = runner.addresses[0]
        done = await doctor(f"http://{host}:{port}")
        told = await doctor(f"http://{host}:{port}", "-o", "json")
    finally:
        await runner.cleanup()
    assert "\\x1b[2J" in done.out
    for text in (done.out, told.out):
        assert all(line.isprintable() for line in text.split("\n"))
    assert any("\x1b[2J" in each["found"] for each in json.loads(told.out)["checks"])  # a program reads all


async def test_the_pool_is_compared_with_the_plan(doctor: Doctor, engine: SimServer, model: Path) -> None:
    """1,000 blocks of 16 tokens at 128 KiB are 1.953 GiB."""
    planned = {"PLAN_MODEL": str(model), "PLAN_FLAGS": "--available-gib 1.9532"}
    found = await doctor.found(engine.url, 0, **planned)
    assert found["capacity"]["result"] == "pass"
    assert "16,000 KV tokens: as planned" in found["capacity"]["found"]
    larger = planned | {"PLAN_FLAGS": "--gpu 24GiB --weights-gib 16 --overhead-gib 2"}
    found = await doctor.found(engine.url, 0, **larger)
    assert found["capacity"]["result"] == "warn"
    assert "67% less than the plan's least" in found["capacity"]["found"]
    found = await doctor.found(engine.url, 0, PLAN_MODEL=str(model))
    assert found["capacity"]["result"] == "pass"


async def test_a_model_that_cannot_be_planned_is_a_warning(
    doctor: Doctor, engine: SimServer, model: Path
) -> None:
    (model / "config.json").write_text('{"model_type": "rwkv"}', encoding="utf-8")
    found = await doctor.found(engine.url, 0, PLAN_MODEL=str(model))
    assert found["capacity"]["result"] == "warn"
    assert "RWKV" in found["capacity"]["found"]


async def test_a_tokenizer_of_another_model_fails(doctor: Doctor, engine: SimServer, tmp_path: Path) -> None:
    folder = write(tmp_path / "tokenizer")
    found = await doctor.found(engine.url, 1, TOKENIZER=str(folder))
    assert found["tokenizer"]["result"] == "fail"
    assert "of 5 probes count otherwise" in found["tokenizer"]["found"]
    told = re.search(r"is (\d+) tokens here, (\d+) to the engine", found["tokenizer"]["found"])
    assert told is not None
    assert told[1] != told[2]
    found = await doctor.found(engine.url, 1, TOKENIZER=str(tmp_path / "nothing"))
    assert found["tokenizer"]["result"] == "fail"


async def test_nobody_at_the_engines_address(doctor: Doctor, engine: SimServer) -> None:
    url = engine.url
    await engine.close()
    found = await doctor.found(url, 1)
    failed = {check for check, each in found.items() if each["result"] == "fail"}
    assert failed == {"engine", "metrics"}
    assert "cannot connect" in found["engine"]["found"]
    assert found["capacity"]["found"] == "not known: the engine does not answer"
    assert found["capacity"]["remedy"] == found["tokenizer"]["remedy"]


@pytest.mark.parametrize(
    ("page", "result", "text"),
    [
        (
            "vllm:gpu_cache_usage_perc 0.5\nvllm:num_requests_running 1\n",
            "warn",
            "gpu_cache_usage_perc (old name)",
        ),
        ("up 1\n", "warn", "no series of vLLM"),
        ("nv_inference_count 1\n", "fail", "the page is of triton"),
    ],
)
async def test_pages_that_are_less_than_they_could_be(
    doctor: Doctor, page: str, result: str, text: str
) -> None:
    async def metrics(_: web.Request) -> web.Response:
        return web.Response(text=page)

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "m", "max_model_len": 4096}]})

    app = web.Application()
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/v1/models", models)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        host, port = runner.addresses[0]
        found = await doctor.found(f"http://{host}:{port}", int(result == "fail"))
    finally:
        await runner.cleanup()
    assert found["metrics"]["result"] == result
    assert text in found["metrics"]["found"]
    assert found["tokenizer"]["result"] == "warn"
    assert "16,384" in found["capacity"]["found"]


async def test_bad_settings_are_all_there_is_to_say(kvctl: Kvctl) -> None:
    done = await kvctl("doctor", "-o", "json", KVCTL_MARGIN="12", KVCTL_PLAN_FLAGS="--tpp 2")
    checks = json.loads(done.out)["checks"]
    assert done.status == 1
    assert {each["check"] for each in checks} == {"settings"}
    assert any("--tpp: no flag of a plan" in each["found"] for each in checks)


async def test_folders_that_cannot_be_written(doctor: Doctor, engine: SimServer, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    inside = str(tmp_path / "file" / "in")
    found = await doctor.found(engine.url, 0, STATE_DIR=inside, ADMIN_SOCKET=f"{inside}/kvctl.sock")
    assert [found[each]["result"] for each in ("state_dir", "admin_socket")] == ["warn", "warn"]


async def test_a_running_daemon_is_asked(doctor: Doctor, daemon: Daemon) -> None:
    own = "http://127.0.0.1:8000"
    found = await doctor.found("http://127.0.0.1:1", 1)
    assert f"gates {own}, not http://127.0.0.1:1" in found["daemon"]["found"]
    found = await doctor.found(own, 1)  # the stand's engine does not listen
    assert found["daemon"]["result"] == "pass"
    daemon.stand.draining = True
    found = await doctor.found(own, 1)
    assert (found["daemon"]["result"], found["daemon"]["remedy"]) == ("warn", "kvctl undrain")
    daemon.stand.draining, daemon.stand.bypass = False, True
    found = await doctor.found(own, 1)
    assert (found["daemon"]["result"], found["daemon"]["remedy"]) == ("warn", "kvctl resume")
    assert found["daemon"]["found"].startswith("bypass: ")


async def test_settings_that_wait_are_named(
    doctor: Doctor, daemon: Daemon, engine: SimServer, tmp_path: Path
) -> None:
    """Each with what would put it in force."""
    found = await doctor.found(engine.url, 0)
    assert found["in_force"]["result"] == "pass"
    config = daemon.stand.config = tmp_path / "kvctl.toml"
    config.write_text("margin = '8%'\nlisten = '127.0.0.1:9'\n[[tenants]]\nname = 'a'\n", encoding="utf-8")
    waits = (await doctor.found(engine.url, 0))["in_force"]
    assert waits["found"] == "changed, and waits for a reload: margin; for a restart: listen, tenants"
    assert waits["remedy"].startswith("kvctl reload, systemctl restart kvctl; ")
    config.write_text("margin = '8%'\n", encoding="utf-8")
    waits = (await doctor.found(engine.url, 0))["in_force"]
    assert (waits["found"], waits["remedy"].split(";")[0]) == (
        "changed, and waits for a reload: margin",
        "kvctl reload",
    )
    config.write_text("margn = '8%'\n", encoding="utf-8")
    waits = (await doctor.found(engine.url, 0))["in_force"]
    assert (waits["result"], "did you mean margin?" in waits["found"]) == ("warn", True)


async def test_a_faulty_file_beside_a_running_daemon(
    daemon: Daemon, kvctl: Kvctl, engine: SimServer, tmp_path: Path
) -> None:
    """The remedy is a command that goes by the daemon's settings, not by the file."""
    config = tmp_path / "faulty.toml"
    config.write_text("margn = 1\n", encoding="utf-8")
    daemon.stand.given = load(None, {"KVCTL_ENGINE_URL": engine.url, "KVCTL_GPUS": "none"})
    refused = await kvctl("doctor", "--config", str(config))
    assert (refused.status, "margn is not a setting" in refused.out) == (1, True)
    assert "    -> kvctl doctor --live goes by its settings" in refused.out
    told = await kvctl("doctor", "--live", "-o", "json", KVCTL_CONFIG=str(config))
    checks = {each["check"]: each for each in json.loads(told.out)["checks"]}
    assert (told.status, checks["settings"]["result"], checks["engine"]["result"]) == (0, "pass", "pass")
    assert checks["settings"]["found"] == f"of the running daemon, for {engine.url}"
    elsewhere = await kvctl("doctor", "--config", str(config), "--socket", str(daemon.socket), **NO_SOCKET)
    assert f"kvctl doctor --live --socket {daemon.socket} goes by its settings" in elsewhere.out
    asked = ("doctor", "--live", "--socket", str(daemon.socket))
    assert (await kvctl(*asked, KVCTL_CONFIG=str(config), **NO_SOCKET)).status == 0


async def test_without_a_daemon_there_are_no_live_settings(doctor: Doctor, engine: SimServer) -> None:
    done = await doctor(engine.url, "--live")
    assert (done.status, done.out) == (3, "")
    assert "is the daemon running" in done.err


def test_secrets_are_taken_from_the_environment() -> None:
    """A daemon does not tell them."""
    entry = {"name": "a", "url": "http://h:1", "engine_api_key": "secret-a"}
    given = {"KVCTL_ENGINES": json.dumps([entry]), "KVCTL_ENGINE_API_KEY": "secret-b", "KVCTL_MARGIN": "7%"}
    document = json.loads(json.dumps(as_document(load(Path("/dev/null"), given))))
    settings, told = settings_of(document, {})
    assert (settings.margin, settings.engines[0].own, settings.engine_api_key) == (0.07, {}, None)
    assert told.text.endswith("its secrets are not told: engine_api_key, engines")
    assert told.remedy.endswith("give KVCTL_ENGINE_API_KEY, KVCTL_ENGINES")
    known = {"KVCTL_ENGINE_API_KEY": "secret-b", "KVCTL_MARGN": "1"}
    settings, _ = settings_of(document, known)
    assert settings.engine_api_key is not None
    assert settings.engine_api_key.get_secret_value() == "secret-b"
