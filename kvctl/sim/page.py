"""The /metrics page, in the names and labels of vLLM 0.32."""

from collections.abc import Iterator, Mapping

from kvctl.sim.engine import SimulatedEngine
from kvctl.sim.observed import Histogram
from kvctl.sim.scheduler import Finish

_REASONS = (*(str(finish) for finish in Finish), "error", "repetition")


def _labels(labels: Mapping[str, str]) -> str:
    return ",".join(f'{key}="{value}"' for key, value in sorted(labels.items()))


def _family(name: str, kind: str, about: str, rows: Mapping[str, float]) -> Iterator[str]:
    """A gauge or counter; ``rows`` maps rendered labels to values."""
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} {kind}"
    for labels, value in rows.items():
        yield f"{name}{{{labels}}} {float(value)!r}" if labels else f"{name} {float(value)!r}"


def _histogram(name: str, about: str, labels: Mapping[str, str], data: Histogram) -> Iterator[str]:
    yield f"# HELP {name} {about}"
    yield f"# TYPE {name} histogram"
    total = 0
    for bound, count in zip((*data.bounds, float("inf")), data.counts, strict=True):
        total += count
        le = "+Inf" if bound == float("inf") else repr(bound)
        yield f"{name}_bucket{{{_labels({**labels, 'le': le})}}} {float(total)!r}"
    yield f"{name}_count{{{_labels(labels)}}} {float(total)!r}"
    yield f"{name}_sum{{{_labels(labels)}}} {data.sum!r}"


def _gauges(engine: SimulatedEngine, base: dict[str, str]) -> Iterator[str]:
    scheduler, plain = engine.scheduler, _labels(base)
    waiting = len(scheduler.waiting)
    yield from _family(
        "vllm:num_requests_running", "gauge", "Requests in the batch.", {plain: len(scheduler.running)}
    )
    yield from _family("vllm:num_requests_waiting", "gauge", "Requests that wait.", {plain: waiting})
    yield from _family(
        "vllm:num_requests_waiting_by_reason", "gauge", "Requests that wait, by reason.",
        {_labels({**base, "reason": "capacity"}): waiting, _labels({**base, "reason": "deferred"}): 0},
    )  # fmt: skip
    states = {"awake": not engine.asleep, "weights_offloaded": engine.asleep, "discard_all": False}
    yield from _family(
        "vllm:engine_sleep_state", "gauge", "1 for the state in force.",
        {_labels({**base, "sleep_state": state}): on for state, on in states.items()},
    )  # fmt: skip
    yield from _family(
        "vllm:kv_cache_usage_perc", "gauge", "KV cache usage, 1 is full.", {plain: scheduler.usage_ratio}
    )


def _counters(engine: SimulatedEngine, base: dict[str, str]) -> Iterator[str]:
    counters, plain = engine.scheduler.counters, _labels(base)
    for name, about, value in (
        ("vllm:num_preemptions_total", "Preemptions.", counters.preemptions),
        ("vllm:prompt_tokens_total", "Prompt tokens processed.", counters.prompt_tokens),
        ("vllm:generation_tokens_total", "Tokens generated.", counters.generation_tokens),
        ("vllm:prefix_cache_queries_total", "Prefix cache queries, tokens.", counters.prefix_queries),
        ("vllm:prefix_cache_hits_total", "Prefix cache hits, tokens.", counters.prefix_hits),
    ):
        yield from _family(name, "counter", about, {plain: value})
    counts = {str(finish): count for finish, count in counters.finished.items()}
    yield from _family(
        "vllm:request_success_total", "counter", "Requests ended, by reason.",
        {_labels({**base, "finished_reason": reason}): counts.get(reason, 0) for reason in _REASONS},
    )  # fmt: skip


def _cache_config(engine: SimulatedEngine) -> Iterator[str]:
    config = engine.config
    labels = {
        "block_size": str(config.block_size),
        "cache_dtype": "auto",
        "effective_attention_block_size": str(config.block_size),
        "enable_prefix_caching": str(config.prefix_caching),
        "engine": "0",
        "gpu_memory_utilization": "0.9",
        "kv_cache_size_tokens": str(config.blocks * config.block_size),
        "kv_offloading_size": "None",
        "mamba_block_size": "None",
        "num_cpu_blocks": "None",
        "num_gpu_blocks": str(config.blocks),
        "num_gpu_blocks_override": str(config.blocks),
        "sliding_window": "None",
    }
    yield from _family(
        "vllm:cache_config_info", "gauge", "Information of the LLMEngine CacheConfig", {_labels(labels): 1}
    )


def render(engine: SimulatedEngine, model: str) -> str:
    """The whole page as Prometheus text."""
    base = {"engine": "0", "model_name": model}
    seen = engine.observed
    lines = [
        *_family("process_start_time_seconds", "gauge", "Start time, Unix epoch.", {"": engine.started_at}),
        *_family(
            "sim:slipped_seconds_total",
            "counter",
            "Step time lost to a busy machine.",
            {"": engine.slipped_s},
        ),
        *_gauges(engine, base),
        *_counters(engine, base),
        *_histogram("vllm:request_prompt_tokens", "Prompt tokens.", base, seen.prompt_tokens),
        *_histogram("vllm:request_generation_tokens", "Output tokens.", base, seen.generation_tokens),
        *_histogram("vllm:time_to_first_token_seconds", "Time to first token.", base, seen.first_token),
        *_histogram("vllm:inter_token_latency_seconds", "Time between tokens.", base, seen.between_tokens),
        *_cache_config(engine),
    ]
    return "\n".join(lines) + "\n"
