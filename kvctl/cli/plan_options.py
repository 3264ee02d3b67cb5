"""The options of ``kvctl plan``. Their long forms are a contract: scripts are written against them."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from kvctl.cli.common import output_option

F = TypeVar("F", bound=Callable[..., Any])


def amount(low: float, high: float, *, whole: bool = False) -> Callable[[Any], float | int]:
    """A type for options: a finite number within bounds; ``whole`` for counts."""
    what = "an integer" if whole else "a number"

    def convert(value: Any) -> float | int:
        try:
            found = int(value) if whole else float(value)
        except (TypeError, ValueError):
            raise click.BadParameter(f"{value!r} is not {what}") from None
        if not math.isfinite(found) or not low <= found <= high:
            raise click.BadParameter(f"{value} is not between {low:g} and {high:g}")
        return found

    convert.__name__ = "N" if whole else "X"
    return convert


COUNT = amount(1, 1 << 31, whole=True)
GIBIBYTES = amount(0, 1 << 20)
SHARE = amount(0.001, 1)

_MODEL: tuple[Any, ...] = (
    click.option("--config", type=click.Path(path_type=Path), help="The model's config.json, or its folder."),
    click.option("--like", metavar="URL", help="A running vLLM: takes its flags and pool, and compares."),
    click.option("--weight-dtype", default="auto", show_default=True, help="auto: the checkpoint's."),
    click.option("--weights-gib", type=GIBIBYTES, help="Weights on one GPU, as the engine logs them."),
)
_ENGINE: tuple[Any, ...] = (
    click.option("--engine", type=click.Choice(["vllm", "sglang", "tgi"]), default="vllm", show_default=True),
    click.option("--engine-version", metavar="V", help="As the engine says it.  [the newest rules]"),
    click.option(
        "--kv-dtype", default="auto", show_default=True, help="auto, bfloat16, fp8, fp8_ds_mla, ..."
    ),
    click.option("--block-size", type=COUNT, help="Tokens of a block."),
    click.option("--gpu-memory-utilization", type=SHARE, help="Also SGLang's static fraction."),
    click.option("--max-model-len", type=COUNT, help="Context length.  [the config's]"),
    click.option("--max-num-batched-tokens", type=COUNT, help="Tokens of one step."),
    click.option("--max-num-seqs", type=COUNT, help="Sequences that run at once."),
    click.option("--prefix-caching/--no-prefix-caching", default=None, help="How recurrent states are kept."),
    click.option("--num-spec", type=amount(0, 1024, whole=True), default=0, help="Speculative tokens."),
    click.option("--spec-method", metavar="NAME", help="eagle, eagle3, mtp, draft_model, dflash, ngram."),
    click.option("--spec-config", type=click.Path(path_type=Path), help="The draft model's config.json."),
    click.option("--async-scheduling/--no-async-scheduling", default=None, help="Two batches in flight."),
    click.option(
        "--hybrid-kv-cache-manager/--disable-hybrid-kv-cache-manager",
        "hybrid_manager",
        default=None,
        help="Off: windows are charged as full attention.",
    ),
    click.option("--num-gpu-blocks-override", type=COUNT, help="Blocks instead of memory."),
    click.option(
        "--swa-full-tokens-ratio", type=SHARE, default=0.8, help="SGLang: sliding to full pool.  [0.8]"
    ),
    click.option("--mamba-slots", type=COUNT, help="SGLang: slots of the state pool."),
)
_MACHINE: tuple[Any, ...] = (
    click.option("--gpu", metavar="NAME|GiB", help="A card by name, or its memory."),
    click.option("--measure", is_flag=True, help="Take the smallest card of this machine (NVML)."),
    click.option("--num-gpus", type=COUNT, help="GPUs in all; TP takes those that PP and DP leave."),
    click.option("--tp", type=COUNT, help="Tensor parallel size.  [1, or what --num-gpus leaves]"),
    click.option("--pp", type=COUNT, default=1, help="Pipeline parallel size."),
    click.option("--dp", type=COUNT, default=1, help="Data parallel size."),
    click.option("--dcp", type=COUNT, default=1, help="Decode context parallel size."),
    click.option(
        "--cpu-offload-gb", "cpu_offload_gib", type=GIBIBYTES, help="GiB of weights kept by the host."
    ),
    click.option("--overhead-gib", type=GIBIBYTES, help="Instead of utilisation, activation and graphs."),
    click.option("--available-gib", type=GIBIBYTES, help="Memory for KV on one GPU, as the engine logs it."),
    click.option("--kv-cache-memory-bytes", type=amount(0, 1 << 50, whole=True), help="The same in bytes."),
)
_ANSWER: tuple[Any, ...] = (
    click.option("--explain", is_flag=True, help="Every figure with its formula and source."),
    click.option(
        "--compare", multiple=True, metavar="CARD|KEY=VALUE,...", help="A further column; repeatable."
    ),
    click.option(
        "--recommend",
        is_flag=False,
        flag_value="kvctl.toml",
        metavar="[FILE]",
        help="Write settings that fit (-: to standard output, and nothing else).",
    ),
    output_option,
)


def with_options(command: F) -> F:
    """All options, in the order in which --help shows them."""
    for option in reversed((*_MODEL, *_MACHINE, *_ENGINE, *_ANSWER)):
        command = option(command)
    return command
