"""The checks of ``kvctl doctor``, in the order in which one depends on another."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kvctl.admin.client import AdminClient
from kvctl.cli import doctor_daemon, doctor_engine, doctor_machine
from kvctl.cli.common import CommandError, daemon, usual_socket
from kvctl.cli.doctor_findings import Finding, failed, passed
from kvctl.cli.serve import raise_file_limit
from kvctl.control.certificates import CertificateError
from kvctl.control.planning import smallest_card
from kvctl.control.poll import Poller
from kvctl.control.probe import probe
from kvctl.core.telemetry import EngineInfo, with_pool
from kvctl.engines.detect import AutoEngine, engine_of
from kvctl.part_configs import authorization, engine_settings, identity_of, trust_of
from kvctl.settings.errors import SettingsError
from kvctl.settings.loading import load
from kvctl.settings.model import Settings
from kvctl.settings.usual import MANUAL


def examine(
    config: Path | None, socket: Path | None, env: Mapping[str, str], timeout: float
) -> list[Finding]:
    """All findings. Where the settings are bad there is nothing else to examine. ``timeout`` in seconds.

    ``socket`` None: as the settings say.
    """
    try:
        settings = load(config, env)
    except SettingsError as error:
        remedy = f"see {MANUAL}; kvctl check-config judges them alone"
        found = [failed("settings", problem, remedy) for problem in error.problems]
        return [*found, *doctor_daemon.whose_settings(socket, config, env, timeout)]
    return _all_of(settings, socket or settings.admin_socket, timeout, _valid(settings))


def examine_live(socket: Path | None, env: Mapping[str, str], timeout: float) -> list[Finding]:
    """All findings by the settings that the daemon runs with. Ends the command where it does not answer."""
    with daemon(socket, timeout) as client:
        document = client.get("/v1/config")
    try:
        settings, told = doctor_daemon.settings_of(document, env)
    except SettingsError as error:
        raise CommandError(f"{error}\nthe daemon is of another version than this command") from None
    return _all_of(settings, socket or usual_socket(), timeout, told)


def _valid(settings: Settings) -> Finding:
    named = ", ".join(one.engine_url for one in engine_settings(settings).values())
    return passed("settings", f"valid, for {named}")


def _all_of(settings: Settings, socket: Path, timeout: float, told: Finding) -> list[Finding]:
    raise_file_limit()
    return [told, *asyncio.run(_examine(settings, socket, timeout))]


async def _examine(settings: Settings, socket: Path, timeout_s: float) -> list[Finding]:
    each = engine_settings(settings)
    engines: list[Finding] = []
    cards: dict[tuple[str, ...], list[Finding]] = {}
    for name, one in each.items():
        found, card_findings = await _examine_engine(one, timeout_s)
        engines += found if len(each) == 1 else [replace(f, check=f"{name}: {f.check}") for f in found]
        cards.setdefault(one.gpus, card_findings)
    return [
        *engines,
        *(finding for findings in cards.values() for finding in findings),
        *doctor_machine.surroundings(settings),
        doctor_machine.clock(),
        *await asyncio.to_thread(doctor_daemon.running, AdminClient(socket, timeout_s), settings),
    ]


async def _examine_engine(settings: Settings, timeout_s: float) -> tuple[list[Finding], list[Finding]]:
    """What is found of one engine, and of its cards."""
    engine = engine_of(settings.engine)
    try:
        identity_of(settings)
        trust = trust_of(settings)
    except CertificateError as error:
        return [failed("certificates", str(error), "kvctl would not start; name files that it can read")], []
    poller = Poller(
        settings.engine_url,
        timeout_s=timeout_s,
        max_bytes=settings.scrape_max_bytes,
        authorization=authorization(settings),
        trust=trust,
    )
    try:
        if isinstance(engine, AutoEngine):
            engine.adopt((await probe(poller)).engine)
        answered, info = await doctor_engine.engine_info(engine, poller)
        page, samples = await doctor_engine.metrics_page(engine, poller)
        card_findings, cards = await doctor_machine.cards(settings, timeout_s)
        tokens = [each async for each in doctor_engine.tokens(settings, info)]
        ranks = list(with_pool(samples, info or EngineInfo()))
        heard = info is not None or bool(samples)
        pool = await doctor_engine.capacity(settings, ranks, poller, smallest_card(cards), heard=heard)
    finally:
        await poller.close()
    return [answered, page, *tokens, pool], card_findings
