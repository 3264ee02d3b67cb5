"""What is known of one engine: its latest samples, their age, and the state that follows.

Law 8: degraded is a state, not an exit. Law 3: a page that stands still while tokens flow is not fresh.

A refused connection is the only fast sign of "down"; a slow page is a sign of load, and progress decides. An
engine is wedged when requests are in flight and no token was seen and no counter moved for
``stall_timeout_s``; it is unreachable when it has not answered anything for as long either. Each of these
judgements stands until something moves. Every ``stall_timeout_s`` one request is let in on trial: the
counters of an engine that gets no work never move, and a state that only traffic can end must not keep all
traffic out.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvctl.core.outcomes import EngineState, SourceFault
from kvctl.core.telemetry import EngineInfo, GpuSample, RankSample, is_another_process

REFUSED_IN_A_ROW = 2  # polls or data-plane connections, before "unreachable"
FROZEN_TOKENS = 64  # tokens seen by the ledger while the page's counters stand still
FROZEN_AFTER_S = 2.0
SURVIVED_S = 5.0  # a token this long after its card failed was made afterwards: the engine lives
_UP = EngineState.UP  # looked up once: a member of an enum costs as much as a call


@dataclass(frozen=True, slots=True, kw_only=True)
class ViewConfig:
    """Ages in seconds: fresh up to ``late_after_s``, stale beyond ``stale_after_s``."""

    late_after_s: float = 1.4
    stale_after_s: float = 10.0
    stall_timeout_s: float = 30.0
    cards_named: bool = True  # False: all cards of the machine are watched, and some may be other engines'


class Moved(NamedTuple):
    """What has changed from one page to the next. Counters are sums over ranks; None: unknown."""

    preempted: float | None
    generated: float | None
    restarted: tuple[str, ...]  # ranks that are another process than before


class EngineView:
    """Takes telemetry events and the ledger's activity; answers ``state(now)``."""

    def __init__(self, config: ViewConfig) -> None:
        self._config = config
        self.samples: tuple[RankSample, ...] = ()
        self.info = EngineInfo()
        self.sampled_at: float | None = None
        self._fault: SourceFault | None = None
        self._refused = 0
        self._contact_at: float | None = None
        self._moved_at: float | None = None
        self._tokens_since_move = 0.0
        self._token_at = float("-inf")
        self._busy_since: float | None = None
        self._stuck: EngineState | None = None
        self._tried_at = float("-inf")
        self._cards: frozenset[str] = frozenset()
        self._broken_cards: frozenset[str] = frozenset()
        self._ecc: dict[str, int] = {}
        self._failed_cards: set[str] = set()
        self._failed_at = float("-inf")
        self._cards_named: bool | None = None
        self._faulty = self._asleep = False  # by the cards, by the last page

    # --- what comes in ------------------------------------------------------------------------------

    @property
    def stall_timeout_s(self) -> float:
        """In force now."""
        return self._config.stall_timeout_s

    def reconfigured(self, config: ViewConfig) -> None:
        """Use other times from now on."""
        self._config = config
        self._faulty = self._has_broken_card()

    def scraped(self, samples: tuple[RankSample, ...], now: float) -> Moved:
        """A page came. Returns what moved since the page before."""
        before = {s.rank: s for s in self.samples}
        restarted = tuple(
            s.rank for s in samples if s.rank in before and is_another_process(before[s.rank], s)
        )
        moved = Moved(
            preempted=None if restarted else _delta(before, samples, "preemptions_total"),
            generated=None if restarted else _generated(before, samples),
            restarted=restarted,
        )
        if restarted or not self.samples or _anything_moved(before, samples):
            self._moved_at = now
            self._tokens_since_move = 0.0
            self._stuck = None
        if restarted:
            self._cards_well()
        self._asleep = any(sample.awake is False for sample in samples)
        self.samples, self.sampled_at, self._fault = samples, samples[0].at, None
        self._contacted(now)
        return moved

    def scrape_failed(self, fault: SourceFault, now: float) -> None:
        """A poll brought nothing."""
        if fault is SourceFault.REFUSED:
            self._refused += 1
            return
        self._fault = fault
        if fault not in {SourceFault.TIMEOUT, SourceFault.FAILED}:
            self._contacted(now)

    def described(self, info: EngineInfo, now: float) -> None:
        """The engine told its models and context."""
        self.info = info
        self._contacted(now)

    def connect_failed(self) -> None:
        """The data plane's connection was refused."""
        self._refused += 1

    def cards_read(self, cards: Sequence[GpuSample], *, named: bool | None = None) -> None:
        """Cards were read: a lost one of the engine's, or one with new uncorrectable errors, is a fault.

        ``named``: whether they are known to be the engine's; None: as configured.
        """
        self._cards_named = named
        for card in cards:
            errors = card.ecc_uncorrected_total
            if errors is not None:
                if errors > self._ecc.get(card.uuid, errors):
                    self.cards_failed((card.uuid,), card.at)
                self._ecc[card.uuid] = errors
        self._cards = frozenset(card.uuid for card in cards)
        self._broken_cards = frozenset(card.uuid for card in cards if card.lost)
        self._faulty = self._has_broken_card()

    def cards_failed(self, uuids: Sequence[str], now: float) -> None:
        """The driver reported an error that ends all work on these cards: a fault until a restart."""
        self._failed_cards.update(uuids)
        self._failed_at = now
        self._faulty = self._has_broken_card()

    def token_seen(self, tokens: float, now: float) -> None:
        """A token came through the data plane."""
        if self._failed_cards and len(self.samples) <= 1 and now - self._failed_at > SURVIVED_S:
            self._cards_well()  # law 10: the work that ended on that card was another's
        self._token_at = now
        self._tokens_since_move += tokens
        self._stuck = None
        self._refused = 0

    def answered(self, now: float) -> None:
        """An answer came to its natural end: the only sign of life of requests that show no tokens."""
        self._token_at = now
        self._stuck = None
        self._contacted(now)

    def ledger_busy(self, busy: bool, now: float) -> None:
        """Whether requests are in flight that the engine has yet to work on."""
        if not busy:
            self._busy_since = None
        elif self._busy_since is None:
            self._busy_since = now

    # --- what it means ------------------------------------------------------------------------------

    def age(self, now: float) -> float | None:
        """Seconds since the engine's counters were last known to be true; None: never."""
        if self.sampled_at is None:
            return None
        if self._tokens_since_move >= FROZEN_TOKENS and self._moved_at is not None:
            unmoved = now - self._moved_at
            if unmoved > FROZEN_AFTER_S:
                return unmoved
        return now - self.sampled_at

    def looks_empty(self) -> bool:
        """Whether the last page says that nothing runs or waits. A paused engine says so too.

        A page from before the last token says nothing of that token's request.
        """
        if self.sampled_at is None or self.sampled_at <= self._token_at:
            return False
        return bool(self.samples) and all(s.running == 0 and s.waiting == 0 for s in self.samples)

    def state(self, now: float) -> EngineState:
        """The state in force; the first rule that holds wins."""
        if self._faulty:
            return EngineState.FAULT
        if self._refused >= REFUSED_IN_A_ROW:
            return EngineState.UNREACHABLE
        if self._contact_at is None:
            return EngineState.STARTING
        if self._asleep:
            return EngineState.ASLEEP
        if self._stuck is None:
            long_ago, busy_since = now - self._config.stall_timeout_s, self._busy_since
            if busy_since is not None and busy_since < long_ago and self._token_at < long_ago:
                self._judge_progress(now, long_ago)
        if self._stuck is None:
            return self._telemetry_state(now)
        on_trial = now - self._tried_at > self._config.stall_timeout_s
        return EngineState.TRIAL if on_trial else self._stuck

    def _cards_well(self) -> None:
        """Forget the errors that the driver reported."""
        self._failed_cards.clear()
        self._faulty = self._has_broken_card()

    def _has_broken_card(self) -> bool:
        """Whether a card is broken that is known to be the engine's, or all that may be."""
        broken = self._broken_cards | self._failed_cards
        named = self._config.cards_named if self._cards_named is None else self._cards_named
        if not named:
            return bool(broken) and broken >= self._cards
        return bool(broken & self._cards) if self._cards_named else bool(broken)

    def tried(self, now: float) -> None:
        """The request on trial was let in: until it shows a token the old judgement stands again."""
        self._tried_at = now

    def _telemetry_state(self, now: float) -> EngineState:
        age = self.age(now)
        if age is not None and age <= self._config.late_after_s:
            return _UP
        if age is None or self._fault is SourceFault.NO_SERIES:
            return EngineState.NO_TELEMETRY
        return EngineState.LATE if age <= self._config.stale_after_s else EngineState.STALE

    def _judge_progress(self, now: float, long_ago: float) -> None:
        """With requests in flight and no token for the stall timeout: is it stuck, or only slow?"""
        if self._contact_at is not None and self._contact_at < long_ago:
            self._stuck = EngineState.UNREACHABLE
        elif self._counters_known() and self._moved_at is not None and self._moved_at < long_ago:
            self._stuck = EngineState.WEDGED
        if self._stuck is not None:
            self._tried_at = now

    def _counters_known(self) -> bool:
        return any(s.generation_tokens_total is not None for s in self.samples)

    def _contacted(self, now: float) -> None:
        if self._refused >= REFUSED_IN_A_ROW:  # the engine was down: this is another process
            self._cards_well()
            self._moved_at, self._stuck = now, None
        if self._stuck is EngineState.UNREACHABLE:
            self._stuck = None
        self._contact_at = now
        self._refused = 0


def _delta(before: dict[str, RankSample], samples: Sequence[RankSample], name: str) -> float | None:
    total, known = 0.0, False
    for sample in samples:
        new: float | None = getattr(sample, name)
        old: float | None = getattr(before[sample.rank], name) if sample.rank in before else None
        if new is not None and old is not None:
            total, known = total + new - old, True
    return total if known else None


def _generated(before: dict[str, RankSample], samples: Sequence[RankSample]) -> float | None:
    """Output tokens since the page before; where totals move only at a request's end, by engine steps."""
    if not any(sample.counts_at_end for sample in samples):
        return _delta(before, samples, "generation_tokens_total")
    total, known = 0.0, False
    for sample in samples:
        old = before.get(sample.rank)
        if old is None or None in (sample.steps_total, old.steps_total, sample.running, old.running):
            continue
        steps = (sample.steps_total or 0.0) - (old.steps_total or 0.0)
        total, known = total + steps * min(sample.running or 0, old.running or 0), True
    return total if known else None


def _anything_moved(before: dict[str, RankSample], samples: Sequence[RankSample]) -> bool:
    """Counters, or the pool's usage, which moves during a long silent prefill."""
    names = ("generation_tokens_total", "prompt_tokens_total", "kv_usage_ratio", "steps_total")
    return any(
        sample.rank not in before or getattr(sample, name) != getattr(before[sample.rank], name)
        for sample in samples
        for name in names
    )
