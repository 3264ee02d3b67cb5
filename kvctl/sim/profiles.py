"""How long an engine step takes, as data.

    seconds = base + prefill_token x prompt tokens computed + decode_sequence x sequences that decode
              + kv_token x KV tokens read by attention

The first term is reading the weights (and launching kernels), the second is arithmetic, the third is
sampling and bookkeeping per sequence, the fourth is reading the KV cache.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Coefficients of the step time, and what a request spends before any step; in seconds.

    ``request_s`` is that on an idle engine, ``request_sequence_s`` more for each sequence that runs: whoever
    takes a request in is busy with their tokens. A server does both for real, so they count in a replay only.
    """

    name: str
    about: str
    base_s: float
    prefill_token_s: float
    decode_sequence_s: float
    kv_token_s: float
    request_s: float = 0.0
    request_sequence_s: float = 0.0

    def step_seconds(self, *, prefill_tokens: int, decode_sequences: int, kv_tokens: int) -> float:
        """Duration of a step that computes and reads that much."""
        return (
            self.base_s
            + self.prefill_token_s * prefill_tokens
            + self.decode_sequence_s * decode_sequences
            + self.kv_token_s * kv_tokens
        )

    def way_in_seconds(self, running: int) -> float:
        """From an admission to the engine's scheduler, while so many sequences run."""
        return self.request_s + self.request_sequence_s * running

    def slower(self, times: float) -> "Profile":
        """The same engine on a machine that is so many times slower."""
        seconds = {name: getattr(self, name) * times for name in SECONDS}
        return replace(self, **seconds)


SECONDS = tuple(one.name for one in fields(Profile) if one.name not in ("name", "about"))
"""The coefficients of a profile."""

_ALL = (
    Profile(
        name="tiny-cpu",
        about=(
            "a tiny random model on the CPU build of vLLM 0.32, two cores: an overloaded run showed 10 ms"
            " between tokens at 20 decoding sequences and 49 prompt tokens a step with 31k KV tokens held"
        ),
        base_s=2.5e-3,
        prefill_token_s=3e-5,
        decode_sequence_s=1.5e-4,
        kv_token_s=1e-7,
    ),
    Profile(
        name="1.5b-shared",
        about=(
            "a 1.5B model in bf16 on a slice of a 300 GB/s, 60 TFLOP/s card: 3.1 GB of weights read per step,"
            " 3 GFLOP per prompt token, 28.7 kB of KV per token"
        ),
        base_s=1.05e-2,
        prefill_token_s=5e-5,
        decode_sequence_s=1e-4,
        kv_token_s=9.6e-8,
    ),
    Profile(
        name="8b-24g",
        about=(
            "an 8B model in bf16 on a 24 GiB card of 900 GB/s and 80 TFLOP/s: 16 GB of weights read per step,"
            " 16 GFLOP per prompt token, 131 kB of KV per token"
        ),
        base_s=1.8e-2,
        prefill_token_s=2e-4,
        decode_sequence_s=5e-5,
        kv_token_s=1.46e-7,
    ),
    Profile(
        name="8b-h200",
        about=(
            "an 8B model in bf16 on an H200 of 4.8 TB/s and 990 TFLOP/s, two thirds of either reached: 16 GB"
            " of weights read per step and a millisecond of launches, 16 GFLOP per prompt token, 131 kB of KV"
            " per token"
        ),
        base_s=6e-3,
        prefill_token_s=2.5e-5,
        decode_sequence_s=2e-5,
        kv_token_s=4.1e-8,
    ),
)

PROFILES: Mapping[str, Profile] = MappingProxyType({profile.name: profile for profile in _ALL})
