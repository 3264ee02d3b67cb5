"""What the driver does to the whole daemon: the state is named, requests do not notice, it ends by itself."""

import asyncio
import re
from pathlib import Path

import pytest

from tests.nvml.drill import Drill
from tests.nvml.served import Stage, engine, stage
from tests.test_serve import until

UUID = "GPU-00000000-drill"
EVERYTHING = ("nvmlInitWithFlags", "nvmlDeviceGetMemoryInfo", "nvmlDeviceGetMemoryInfo_v2")

DRILLS = {
    "hang": (("nvmlDeviceGetMemoryInfo_v2 hang",), "hung"),
    "crash": (("nvmlDeviceGetTemperature crash",), "crashed"),
    "version mismatch": (tuple(f"{name} 18" for name in EVERYTHING), "driver_mismatch"),
    "access taken away": (tuple(f"{name} 17" for name in EVERYTHING), "no_permission"),
}
# a crash in a thread would end the daemon: why a process is usual
NAMES = {"process": list(DRILLS), "thread": ["hang", "version mismatch"]}


async def drilled(on: Stage, drill: Drill, name: str) -> None:
    rules, fault = DRILLS[name]
    await on.served()
    on.load.taken()
    drill.rule(*rules)
    await on.until(on.fault, fault)
    await on.served()
    drill.rule()
    await on.until(on.reads, wanted=True)
    await on.served()
    assert on.load.taken() == {200}, name


@pytest.mark.parametrize("isolation", ["process", "thread"])
async def test_the_data_plane_does_not_notice(tmp_path: Path, drill: Drill, isolation: str) -> None:
    """D10, D15, D22: each state is named, every request is served meanwhile, each ends without a restart."""
    async with stage(tmp_path, NVML_ISOLATION=isolation, GPU_TIMEOUT="1s") as on:
        await on.until(on.reads, wanted=True)
        for name in NAMES[isolation]:
            await drilled(on, drill, name)
        page = await on.it.metrics()
        # once, and again for each second that this machine stood still
        assert re.search(r'^kvctl_gpu_read_faults_total\{fault="hung"\} [1-9]', page, re.MULTILINE)
        lines = "\n".join(on.it.lines())
        assert "GPU readings are back (hung is over)" in lines
        assert "Traceback" not in lines


@pytest.mark.parametrize("isolation", ["process", "thread"])
async def test_no_request_waits_for_a_reading(tmp_path: Path, drill: Drill, isolation: str) -> None:
    """D15: many come and go within one call that hangs, long before it is given up."""
    async with stage(tmp_path, NVML_ISOLATION=isolation) as on:
        await on.until(on.reads, wanted=True)
        drill.rule(*DRILLS["hang"][0])
        await until(lambda: drill.hung)
        on.load.taken()
        await on.served(20)
        assert on.load.taken() == {200}
        assert await on.fault() is None
        drill.rule()


async def test_a_library_that_is_not_there_yet_and_a_card_without_memory_of_its_own(
    tmp_path: Path, drill: Drill
) -> None:
    """D22, D24: kvctl starts without a driver and takes up the card when it comes.

    D01: a unified-memory part, as which it comes, is read by the system's own figure, and says so.
    """
    drill.remove()
    drill.rule("nvmlDeviceGetMemoryInfo 3", "nvmlDeviceGetMemoryInfo_v2 3")
    async with stage(tmp_path) as on:
        await on.until(on.fault, "library_missing")
        await on.served()
        drill.install()
        await on.until(on.reads, wanted=True)
        (card,) = (await on.cards())["gpus"]
        assert card["uuid"] == UUID
        assert "unified memory" in card["name"]
        assert card["free_bytes"] > 0
        assert card["used_bytes"] is None
        await on.served()
        assert on.load.taken() == {200}


async def test_a_card_that_falls_off_the_bus(tmp_path: Path, drill: Drill) -> None:
    """D12: told by the driver, acted upon at once; over when the card reads well and the engine restarted."""
    async with stage(tmp_path, GPU_INTERVAL="30s") as on:  # the next reading is far away
        await on.until(on.reads, wanted=True)
        drill.tell(0, xid=31)  # an application's own fault: told, and nothing else
        await on.counted(f'kvctl_gpu_events_total{{gpu="{UUID}",kind="xid_application"}} 1.0')
        assert await on.state() == "up"
        await on.served()
        assert on.load.taken() == {200}
        drill.tell(0, xid=79)
        await on.until(on.state, "fault")
        answer = await on.it.post()
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"gpu_fault" in answer
        assert f'kvctl_gpu_events_total{{gpu="{UUID}",kind="xid_fatal"}} 1.0' in await on.it.metrics()
        (line,) = [each for each in on.it.lines() if "event=gpu_xid_fatal" in each]
        assert (
            "Xid 79, the card fell off the bus: engines known to be on it get no requests until they restart"
            in line
        )
        port = int(on.sim.url.rpartition(":")[2])
        await on.sim.close()
        on.sim = engine()
        await on.counted('kvctl_telemetry_up{source="engine_metrics"} 0')
        await on.sim.start(port=port)
        await on.until(on.state, "up")
        on.load.taken()
        await on.served()
        assert on.load.taken() == {200}


async def test_let_go_of_on_request(tmp_path: Path, drill: Drill) -> None:  # noqa: ARG001
    """D16: no process of kvctl's holds the driver, traffic goes on, and it is taken up again by itself."""
    async with stage(tmp_path) as on:
        await on.until(on.reads, wanted=True)
        assert children(on.it.process.pid)
        body = {"for_s": 600, "reason": "MIG layout"}
        asked = await asyncio.to_thread(on.client.post, "/v1/gpu/release", body)
        assert asked == {"released_s": 600.0, "kept": True}
        assert not children(on.it.process.pid)
        assert await on.fault() == "released"
        assert (await on.cards())["released_s"] > 100
        await on.served()
        assert on.audit(tmp_path)[-1]["reason"] == "MIG layout"
        await asyncio.to_thread(on.client.post, "/v1/gpu/release", {"for_s": 0})
        await on.until(on.reads, wanted=True)
        await asyncio.to_thread(on.client.post, "/v1/gpu/release", {"for_s": 0.5})
        await on.until(on.reads, wanted=True)
        released = [each for each in on.audit(tmp_path) if each["verb"] == "gpu_release"]
        assert [each["for_s"] for each in released] == [600.0, 0.0, 0.5]
        assert on.load.taken() == {200}


def children(pid: int) -> list[str]:
    """The NVML processes of the daemon."""
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [each for each in pids if b"kvctl.gpu.child" in Path(f"/proc/{each}/cmdline").read_bytes()]
