"""The checks of ``kvctl doctor``, in the order in which one depends on another."""

import asyncio
from collections.abc import Mapping
from pathlib import Path

from kvctl.cli import doctor_engine, doctor_machine
from kvctl.cli.doctor_findings import Finding, failed, passed
from kvctl.cli.serve import raise_file_limit
from kvctl.control.planning import smallest_card
from kvctl.control.poll import Poller
from kvctl.engines.detect import engine_of
from kvctl.settings.errors import SettingsError
from kvctl.settings.loading import load
from kvctl.settings.model import Settings


def examine(config: Path | None, env: Mapping[str, str], timeout: float) -> list[Finding]:
    """All findings. Where the settings are bad there is nothing else to examine. ``timeout`` in seconds."""
    try:
        settings = load(config, env)
    except SettingsError as error:
        remedy = "see docs/configuration.md; kvctl check-config judges them alone"
        return [failed("settings", problem, remedy) for problem in error.problems]
    raise_file_limit()
    return asyncio.run(_examine(settings, timeout))


async def _examine(settings: Settings, timeout_s: float) -> list[Finding]:
    engine = engine_of(settings.engine)
    poller = Poller(settings.engine_url, timeout_s=timeout_s, max_bytes=settings.scrape_max_bytes)
    try:
        answered, info = await doctor_engine.engine_info(engine, poller)
        page, samples = await doctor_engine.metrics_page(engine, poller)
        card_findings, cards = await doctor_machine.cards(settings, timeout_s)
        tokens = [each async for each in doctor_engine.tokens(settings, info)]
        pool = await doctor_engine.capacity(settings, samples, poller, smallest_card(cards))
    finally:
        await poller.close()
    return [
        passed("settings", f"valid, for {settings.engine_url}"),
        answered,
        page,
        *tokens,
        pool,
        *card_findings,
        *doctor_machine.surroundings(settings),
        doctor_machine.clock(),
        await asyncio.to_thread(doctor_machine.daemon, settings, timeout_s),
    ]
