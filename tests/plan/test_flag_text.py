"""Flags as text, as the setting ``plan_flags`` and ``--compare`` take them."""

import pytest

from kvctl.plan import Flags, PlanError
from kvctl.plan.flag_text import flags_text, parse_flags


def test_a_command_line_of_the_engine() -> None:
    asked = parse_flags(
        "--tp 2 --max-model-len=32_768 --no-prefix-caching --async-scheduling --kv-dtype fp8 --gpu 'RTX 4090'"
        " --engine-version 0.20.1 --gpu-memory-utilization 0.95 --cpu-offload-gb 4"
        " --num-gpu-blocks-override 7"
    )
    assert asked.flags == Flags(
        tp=2, max_model_len=32_768, prefix_caching=False, async_scheduling=True, kv_dtype="fp8",
        version="0.20.1", gpu_memory_utilization=0.95, num_gpu_blocks=7,
    )  # fmt: skip
    assert asked.memory.card is not None
    assert (asked.memory.card.name, asked.memory.cpu_offload_gib) == ("RTX 4090", 4.0)
    assert {"tp", "prefix_caching", "gpu"} <= asked.explicit
    assert parse_flags("").explicit == frozenset()


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("--tpp 2", "--tpp: no flag"), ("--max-num-seq 2", "did you mean max-num-seqs"),
        ("--tp two", "--tp: 'two'"), ("--tp", "wants a value"),
        ("--tp --pp 2", "wants a value"), ("tp 2", "no flag"), ("--gpu abacus", "abacus"),
        ("--gpu 'H100", "quotation"), ("--engine llama", "--engine"),
    ],
)  # fmt: skip
def test_what_is_no_flag_is_named(text: str, word: str) -> None:
    with pytest.raises(PlanError, match=word):
        parse_flags(text)


def test_options_are_written_as_they_are_read() -> None:
    given = {
        "tp": 2,
        "prefix_caching": False,
        "gpu": "RTX 4090",
        "cpu_offload_gib": 4.0,
        "explain": True,
        "pp": None,
    }
    text = flags_text(given)
    assert text == "--tp 2 --no-prefix-caching --gpu 'RTX 4090' --cpu-offload-gib 4.0"
    asked = parse_flags(text)
    assert (asked.flags.tp, asked.flags.prefix_caching, asked.memory.cpu_offload_gib) == (2, False, 4.0)
