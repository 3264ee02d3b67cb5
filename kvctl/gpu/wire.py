"""What kvctl and its NVML process say to each other: one JSON object a line, answers in the order asked."""

from dataclasses import dataclass

import msgspec

from kvctl.gpu.base import GpuReading
from kvctl.gpu.faults import CardEvent

LINE_MAX = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """``read``, ``wait`` (for ``wait_ms``) or ``close``."""

    number: int
    what: str
    wait_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """``said``: log lines of the session meanwhile, each a level and a text."""

    number: int
    reading: GpuReading | None = None
    events: tuple[CardEvent, ...] | None = None
    said: tuple[tuple[int, str], ...] = ()


_encoder = msgspec.json.Encoder(enc_hook=dict)  # read-only mappings
_questions = msgspec.json.Decoder(Question)
_answers = msgspec.json.Decoder(Answer)


def written(message: Question | Answer) -> bytes:
    """As a line."""
    return _encoder.encode(message) + b"\n"


def question(line: bytes) -> Question:
    """Raises ValueError for anything else."""
    return _questions.decode(line)


def answer(line: bytes) -> Answer:
    """Raises ValueError for anything else."""
    return _answers.decode(line)
