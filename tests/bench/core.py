"""What the gate costs by itself: a decision, a request on its way in and out, a tick.

    python -m tests.bench.core [-o json] [--leases 256] [--rounds 7]

CPU time; of each figure the median of the rounds' best. ``roomy``: the pool has room, so that no curve is
looked at; ``full``: each arrival stands at the budget's edge, so that every one is weighed by the curve. A
tick comes after every lease has moved; ``alike`` leases have one prompt, cap and progress, ``mixed`` ones
have none in common.
"""

import cProfile
import json
import pstats
import random
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from statistics import median
from time import process_time

from kvctl.core.claim import Shape
from kvctl.core.events import Admit, Arrived, Ended, EngineDescribed, Progressed, Queued, Scraped, Ticked
from kvctl.core.gate import Gate
from kvctl.core.outcomes import EndReason
from kvctl.core.supply import GateConfig
from kvctl.core.telemetry import EngineInfo, RankSample

MODEL = "bench"
LEASES = 256
NOW = 100.0
TIMES = 200


def shape(prompt: int, output: int | None) -> Shape:
    """A chat request."""
    return Shape(route="chat", model=MODEL, prompts=(prompt,), asked_output=output, stream=True)


class Site:
    """A gate with leases in flight, all of which have shown tokens."""

    def __init__(self, leases: int, *, mixed: bool, output: int | None = 512) -> None:
        self.rng = rng = random.Random(1)
        self.gate = Gate(GateConfig(itl_target_s=None))
        self.gate.handle(EngineDescribed(EngineInfo(models=(MODEL,), context_tokens=32_768)), NOW)
        self.pool(1 << 26)
        self.names = [f"l{number}" for number in range(leases)]
        for name in self.names:
            prompt = int(rng.expovariate(1 / 600)) + 1 if mixed else 300
            cap = rng.choice([256, 512, 1024, 2048, 4096, None]) if mixed else output
            self.gate.handle(Arrived(name, shape(prompt, cap)), NOW)
            self.gate.handle(Progressed(name, rng.randrange(1, 250) if mixed else 3), NOW)
        self.tick()

    def pool(self, tokens: int) -> None:
        """The engine says that it has so many."""
        sample = RankSample(rank="0", at=NOW, capacity_tokens=tokens, capacity_exact=True, kv_usage_ratio=0.0)
        self.gate.handle(Scraped((sample,), NOW), NOW)

    def tick(self) -> None:
        """A beat."""
        self.gate.handle(Ticked(), NOW)

    def move(self) -> None:
        """Everyone makes three tokens."""
        for name in self.names:
            self.gate.handle(Progressed(name, 3), NOW)

    def fill(self, asked: Shape) -> None:
        """Only just room for one like that."""
        self.tick()
        told = self.gate.outlook(asked, NOW)
        assert not isinstance(told, Queued)
        assert told.forecast_tokens is not None
        self.pool(int(told.forecast_tokens / 0.95) + 100)


def per_call(times: int, call: Callable[[int], object]) -> float:
    """Seconds of one call."""
    started = process_time()
    for number in range(times):
        call(number)
    return (process_time() - started) / times


def decision_us(site: Site, asked: Shape) -> float:
    """One arrival that is let in; its end is not counted."""
    spent = 0.0
    for number in range(TIMES):
        arrived = Arrived(f"d{number}", asked)
        started = process_time()
        told = site.gate.handle(arrived, NOW)
        spent += process_time() - started
        assert isinstance(told[0], Admit)
        site.gate.handle(Ended(arrived.request_id, EndReason.CLIENT_GONE), NOW)
    return spent / TIMES * 1e6


def request(site: Site, name: str, asked: Shape) -> None:
    """Arrival, first token, one more, end."""
    site.gate.handle(Arrived(name, asked), NOW)
    site.gate.handle(Progressed(name, 1), NOW + 0.01)
    site.gate.handle(Progressed(name, 1), NOW + 0.02)
    site.gate.handle(Ended(name, EndReason.FINISHED, 20, 200), NOW + 0.03)


def calls(site: Site, asked: Shape) -> float:
    """Calls of functions, those of C too, that one request takes."""
    profile = cProfile.Profile()
    for number in range(TIMES):
        profile.enable()
        request(site, f"c{number}", asked)
        profile.disable()
    return float(pstats.Stats(profile).total_calls) / TIMES - 1.0  # type: ignore[attr-defined]


def tick_ms(site: Site) -> float:
    """The best of ten beats."""
    spent = []
    for _ in range(10):
        site.move()
        spent.append(per_call(1, lambda _: site.tick()))
    return min(spent) * 1e3


def figures(leases: int) -> Iterator[tuple[str, float]]:
    """One round."""
    asked = shape(200, 512)
    roomy = Site(leases, mixed=True)
    yield "decision_us", decision_us(roomy, asked)
    yield "decision_no_limit_us", decision_us(roomy, shape(200, None))
    yield "request_us", per_call(TIMES, lambda number: request(roomy, f"q{number}", asked)) * 1e6
    yield "request_calls", calls(roomy, asked)
    roomy.fill(asked)
    yield "decision_full_us", decision_us(roomy, asked)
    yield "tick_alike_ms", tick_ms(Site(leases, mixed=False))
    yield "tick_alike_no_limit_ms", tick_ms(Site(leases, mixed=False, output=None))
    yield "tick_mixed_ms", tick_ms(Site(leases, mixed=True))


def measured(rounds: int = 7, leases: int = LEASES) -> dict[str, float]:
    """Medians over the rounds."""
    every = [dict(figures(leases)) for _ in range(rounds)]
    return {name: round(median(one[name] for one in every), 2) for name in every[0]}


def main() -> None:
    """Print the figures."""
    parser = ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("-o", "--output", choices=["text", "json"], default="text")
    parser.add_argument("--leases", type=int, default=LEASES)
    parser.add_argument("--rounds", type=int, default=7)
    chosen = parser.parse_args()
    made = measured(chosen.rounds, chosen.leases)
    if chosen.output == "json":
        sys.stdout.write(json.dumps(made) + "\n")
        return
    for name, value in made.items():
        sys.stdout.write(f"{name:24} {value:9.2f}\n")


if __name__ == "__main__":
    main()
