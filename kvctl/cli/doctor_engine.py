"""The engine as ``kvctl doctor`` sees it: answers, metrics, tokens, capacity."""

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from kvctl.cli.doctor_findings import Finding, failed, passed, warned
from kvctl.control.dialing import base_of, connector_to, trusting
from kvctl.control.plan_check import ask_engine
from kvctl.control.planning import PlanSource, judge, plan_source
from kvctl.control.poll import Poller, PollError
from kvctl.core.outcomes import SourceFault
from kvctl.core.telemetry import EngineInfo, RankSample, together
from kvctl.engines.base import Engine, PageError
from kvctl.engines.detect import engine_of_page
from kvctl.part_configs import trust_of
from kvctl.plan import Card, PlanError, Verdict
from kvctl.settings.model import Settings
from kvctl.tokens.base import CountMethod
from kvctl.tokens.chain import PROBES, ChainCounter
from kvctl.tokens.engine import Ask
from kvctl.tokens.files import TokenizerError
from kvctl.tokens.foreign import Interpreter, http_post
from kvctl.tokens.load import BOUND, ENGINE, load_counter
from kvctl.tokens.source import Uncountable

_SHOWN = "The quick brown fox"  # the counts that are shown are of the probe that begins so
_USAGE = (("kv_cache_usage_perc", "new"), ("gpu_cache_usage_perc", "old"))

_NOBODY = "start the engine, or set engine_url to where it listens"
_NO_SERIES = (
    "start vLLM without --disable-log-stats; until then the budget is a guess (plan_model, or the fallback)"
)


async def engine_info(engine: Engine, poller: Poller) -> tuple[Finding, EngineInfo | None]:
    """Whether it answers, and what it serves."""
    paths = (engine.info_path, *engine.more_info_paths)
    infos = []
    for path in paths:
        try:
            found = json.loads((await poller.get(path, "application/json")).body)
        except PollError as error:
            remedy = _NOBODY if error.fault is SourceFault.REFUSED else f"see why {path} gives no list"
            return failed("engine", f"{poller.shown_url}: {error}", remedy), None
        except (ValueError, RecursionError):
            return failed("engine", f"{poller.shown_url}{path} is no JSON", _NOBODY), None
        infos.append(engine.parse_info(found if isinstance(found, dict) else {}))
    info = together(infos)
    if not info.models:
        return warned("engine", f"{poller.shown_url} names no model", "is this the engine's API?"), info
    names = ", ".join(info.models)
    if info.context_tokens is None:
        text = f"{names}; context unknown"
        return warned("engine", text, "set max_context: no request can be refused as too long"), info
    return passed("engine", f"{names}, context {info.context_tokens:,} tokens"), info


async def metrics_page(engine: Engine, poller: Poller) -> tuple[Finding, list[RankSample]]:
    """Whether the page can be read, and by which names."""
    try:
        answer = await poller.get(engine.metrics_path, "text/plain;version=0.0.4")
        page = answer.body.decode(errors="replace")
        samples = engine.parse_metrics(page, answer.answered_at)
    except PollError as error:
        remedy = _NO_PAGE.get(engine.name, "the engine must serve its metrics page: see engine_url")
        return failed("metrics", str(error), remedy), []
    except PageError as error:
        other = engine_of_page(page)
        if other is not None and other != engine.name:
            return failed("metrics", f"the page is of {other}, not of {engine.name}", "set engine"), []
        return warned("metrics", str(error), _NO_SERIES), []
    if engine.name in _FIELDS_OF_OTHERS:
        return _judged_other(samples, _FIELDS_OF_OTHERS[engine.name]), samples
    return _judged_page(page, samples), samples


_NO_PAGE = {
    "sglang": "start SGLang with --enable-metrics; without, its state is no_telemetry",
    "llamacpp": "start llama.cpp's server with --metrics; without, its state is no_telemetry",
}
_ALIVE = frozenset({"waiting", "generation_tokens_total"})
# What a page of theirs must have. TGI's series appear with their first value.
_FIELDS_OF_OTHERS = {
    "tgi": frozenset({"waiting"}),
    "sglang": frozenset({"kv_usage_ratio", "running"}) | _ALIVE,
    "llamacpp": frozenset({"running"}) | _ALIVE,
}


def _judged_other(samples: list[RankSample], needed: frozenset[str]) -> Finding:
    gauges = ", ".join(sorted({sample.usage_gauge for sample in samples if sample.usage_gauge}))
    text = f"{len(samples)} rank{'s' if len(samples) > 1 else ''}, usage gauge {gauges or 'none'}"
    absent = sorted({field for sample in samples for field in sample.absent if field in needed})
    # what belongs to the engine as a whole is on its first rank's sample alone
    absent = [field for field in absent if all(field in sample.absent for sample in samples)]
    if absent:
        return warned(
            "metrics", f"{text}; absent: {', '.join(absent)}", "scrape the engine itself, not a copy"
        )
    return passed("metrics", text)


def _judged_page(page: str, samples: list[RankSample]) -> Finding:
    prefix = "vllm:" if "\nvllm:" in f"\n{page}" else "vllm_"
    name, age = next(((n, age) for n, age in _USAGE if f"\n{prefix}{n}" in f"\n{page}"), ("none", "absent"))
    text = f"{len(samples)} rank{'s' if len(samples) > 1 else ''}, usage gauge {prefix}{name} ({age} name)"
    unsupported = next((sample.unsupported for sample in samples if sample.unsupported), None)
    if unsupported is not None:
        return warned(
            "metrics", f"{text}; {unsupported}", "gauges mean something else here: the ledger decides"
        )
    absent = sorted({field for sample in samples for field in sample.absent if field in _NEEDED})
    if absent:
        return warned(
            "metrics", f"{text}; absent: {', '.join(absent)}", "scrape the engine itself, not a copy"
        )
    return passed("metrics", text)


_NEEDED = frozenset({"kv_usage_ratio", "running", "waiting", "preemptions_total", "generation_tokens_total"})


async def tokens(settings: Settings, info: EngineInfo | None) -> AsyncIterator[Finding]:
    """How prompts are counted: the local tokenizer and template against the engine's /tokenize."""
    url, trust = settings.engine_url, trust_of(settings)
    async with aiohttp.ClientSession(connector=connector_to(url)) as session:
        ask = Interpreter(http_post(session, base_of(url), options=lambda: trusting(url, trust)))
        if info is not None:
            ask.kind = lambda: info.engine
        try:
            counter = _counter(settings, settings.tokenizer, ask)
        except TokenizerError as error:
            yield failed("tokenizer", str(error), "kvctl would not start; set tokenizer")
            return
        engine = _counter(settings, ENGINE, ask)
        try:
            yield await _counted(settings, counter, engine, info)
        finally:
            await counter.close()


def _counter(settings: Settings, setting: str, ask: Ask | None) -> ChainCounter:
    return load_counter(
        setting,
        ask=ask,
        inline_bytes=settings.tokenize_inline_bytes,
        workers=1,
        timeout_s=settings.tokenize_timeout,
    )


async def _counted(
    settings: Settings, counter: ChainCounter, engine: ChainCounter, info: EngineInfo | None
) -> Finding:
    if settings.tokenizer == BOUND:
        remedy = "set tokenizer to the model's folder, or engine: no 400 can be proven from bytes"
        return warned("tokenizer", "counts are bounds from bytes", remedy)
    if info is None or not info.models:
        return warned("tokenizer", "not compared: the engine does not answer", _NOBODY)
    model = info.models[0]
    shown = await _shown(engine, model)
    if settings.tokenizer == ENGINE:
        if shown is None:
            remedy = "set tokenizer to the model's folder; until then bytes bound the count"
            return warned("tokenizer", "the engine's /tokenize gives no counts", remedy)
        return passed("tokenizer", f"the engine counts: {shown}")
    wrong = await counter.verify(model)
    if wrong is None or shown is None:
        text = "not compared: the engine's /tokenize gives no counts"
        return warned("tokenizer", text, "make sure that tokenizer is the served model's folder")
    if wrong:
        first = await _difference(counter, engine, model)
        text = f"{wrong} of {len(PROBES)} probes count otherwise: {first}; {_described(counter)}"
        remedy = (
            "tokenizer must be the served model's folder, with the engine's --chat-template if it has one"
        )
        return failed("tokenizer", text, remedy)
    text = f"{len(PROBES)} probes count as the engine does: {shown}; {_described(counter)}"
    return passed("tokenizer", text)


def _described(counter: ChainCounter) -> str:
    """The local tokenizer's chat template, and whether counts of its parts are kept."""
    own = counter.own
    if own is None:
        return "no tokenizer of its own"
    named = f"chat template {', '.join(own.templates)}" if own.templates else "no chat template"
    return named if own.keeps else f"{named}; prompts are counted whole: its counts do not add up"


async def _difference(counter: ChainCounter, engine: ChainCounter, model: str) -> str:
    """The first probe that the local tokenizer by itself counts otherwise than the engine, in words."""
    for probe in PROBES:
        own, true = await _own_count(counter, model, probe), await _true_count(engine, model, probe)
        if own != true:
            kind = f'"{probe[:20]} ..."' if isinstance(probe, str) else "a chat"
            kind = "a chat with tools" if isinstance(probe, dict) and "tools" in probe else kind
            return (
                f"{kind} is {'not countable' if own is None else f'{own} tokens'} here, {true} to the engine"
            )
    return "the difference is gone by now"


async def _own_count(counter: ChainCounter, model: str, probe: str | dict[str, Any]) -> int | None:
    if counter.own is None:
        return None
    try:
        if isinstance(probe, str):
            return (await counter.own.text(model, [probe], add_special_tokens=True))[0]
        return await counter.own.chat(model, probe, 512)
    except Uncountable:
        return None


async def _true_count(engine: ChainCounter, model: str, probe: str | dict[str, Any]) -> int:
    if isinstance(probe, str):
        return (await engine.count_text(model, [probe])).prompts[0]
    return (await engine.count_chat(model, probe, 512)).prompts[0]


async def _shown(counter: ChainCounter, model: str) -> str | None:
    """A sample's count in words; None: it is only a bound."""
    text = next(each for each in PROBES if isinstance(each, str) and each.startswith(_SHOWN))
    count = await counter.count_text(model, [text])
    if count.method is CountMethod.BOUND:
        return None
    return f'"{_SHOWN} ..." is {count.prompts[0]} tokens'


async def capacity(
    settings: Settings, samples: list[RankSample], poller: Poller, card: Card | None, *, heard: bool
) -> Finding:
    """The engine's pool against the plan; ``heard``: it answered what it was asked before."""
    reported = [sample.capacity_tokens for sample in samples if sample.capacity_tokens]
    try:
        source = plan_source(settings.plan_model, settings.tokenizer, settings.plan_flags)
        if source is None:
            return _unplanned(settings, reported, heard=heard)
        return await _planned(source, poller, card)
    except PollError as error:
        return failed("capacity", str(error), _NOBODY)
    except PlanError as error:
        text = f"{_told(reported)}; not planned: {error}"
        return warned("capacity", text, "set plan_model and plan_flags so that the pool can be planned")


def _told(reported: list[int]) -> str:
    return f"the engine reports {sum(reported):,} KV tokens" if reported else "the engine reports no pool"


def _unplanned(settings: Settings, reported: list[int], *, heard: bool) -> Finding:
    if reported:
        return passed("capacity", f"{_told(reported)}; not compared: set plan_model to the model's folder")
    if settings.capacity_tokens is not None:
        return passed("capacity", f"capacity_tokens says {settings.capacity_tokens:,} KV tokens a rank")
    if not heard:
        return warned("capacity", "not known: the engine does not answer", _NOBODY)
    text = f"{_told(reported)}: the fallback of {settings.fallback_budget_tokens:,} KV tokens applies"
    return warned("capacity", text, "set capacity_tokens, or plan_model (and plan_flags) to have it planned")


async def _planned(source: PlanSource, poller: Poller, card: Card | None) -> Finding:
    judgement = judge(source, await ask_engine(poller), card)
    check = judgement.check
    if check is None and judgement.tokens is None:
        text = f"the engine reports no pool, and the plan has none: {judgement.note}"
        return warned("capacity", text, "give plan_flags, such as --gpu H100 --tp 2")
    if check is None:
        text = f"the engine reports no pool; planned: at least {judgement.tokens:,} KV tokens a rank"
        return warned(
            "capacity", text, "requests beyond it get 429; set capacity_tokens where you know better"
        )
    if check.verdict is Verdict.AGREES:
        return passed("capacity", check.sentence)
    remedy = (
        "compare the engine's flags with plan_flags (kvctl plan --like URL --explain); look for a neighbour"
    )
    return warned("capacity", check.sentence, remedy)
