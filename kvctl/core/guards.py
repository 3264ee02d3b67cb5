"""The other limits: prefill backlog, decode concurrency, sequence slots.

On a big card with long prompts the KV pool is not what binds. Each guard here says how much room it sees, and
the gate asks all of them.

A guard that learns its limit while it throttles locks itself in: it admits little, measures little, and
admits less. So rates are read from busy stretches only, the best of the last minute counts, a limit is never
lowered while it is not the one that binds, and it always probes upwards.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from kvctl.core.claim import Claim
from kvctl.core.ledger import Lease, Ledger
from kvctl.core.outcomes import Limit, RejectReason

RATE_WINDOW_S = 60.0
FEWEST_RATES = 6  # busy stretches before a prefill rate is believed
STRETCH_S = 1.0  # shortest busy stretch that is a reading: completions come in lumps
SHARE_OF_TTFT = 0.5  # of the target, that prefill may take: the rest is for the unforeseen
LARGE_PROMPT_SHARE = 0.25  # of its own prefill time, that a prompt beyond the target may wait for others


class PrefillGuard:
    """Compares prompts without a first token with the rate at which the engine prefills.

    The engine computes prompts one after the other, in chunks. So in a stretch from one first token to a
    later one, with prompts waiting throughout, it computed exactly the prompts whose first token came in it.
    """

    def __init__(self, ttft_target_s: float | None) -> None:
        self._target = ttft_target_s
        self._rates: deque[tuple[float, float]] = deque()
        self._best: float | None = None  # the best of them; None: not known
        self._since: float | None = None
        self._taken = 0
        self.backlog = 0

    def aim(self, ttft_target_s: float | None) -> None:
        """Use another target from now on."""
        self._target = ttft_target_s

    def admitted(self, lease: Lease, now: float) -> None:
        """A prompt joins the backlog."""
        if self.backlog == 0:
            self._since, self._taken = now, 0
        self.backlog += _prompt(lease)

    def first_token(self, lease: Lease, now: float) -> None:
        """A prompt has been computed."""
        prompt = _prompt(lease)
        self._leave(prompt)
        self._taken += prompt
        if self._since is not None and now - self._since >= STRETCH_S:
            self._rates.append((now, self._taken / (now - self._since)))
            self._best = None
            self._since, self._taken = now, 0

    def gone(self, lease: Lease) -> None:
        """A lease ended before its first token: the current stretch is spoilt."""
        self._leave(_prompt(lease))
        self._since = None

    def rate(self, now: float) -> float | None:
        """Prompt tokens a second, the best stretch of the last minute; None: not enough seen."""
        while self._rates and self._rates[0][0] < now - RATE_WINDOW_S:
            self._rates.popleft()
            self._best = None
        if len(self._rates) < FEWEST_RATES:
            return None
        if self._best is None:
            self._best = max(rate for _, rate in self._rates)
        return self._best

    def wait(self, prompt_tokens: int, now: float) -> float:
        """Seconds by which a prompt that joins now would wait too long; 0: it fits."""
        if self._target is None or self.backlog == 0 or (rate := self.rate(now)) is None:
            return 0.0
        ahead, own = self.backlog / rate, prompt_tokens / rate
        allowed = self._target * SHARE_OF_TTFT
        if own > allowed:  # its target is lost anyway; it must not wait for an idle engine for ever
            return max(ahead - LARGE_PROMPT_SHARE * own, 0.0)
        return max(ahead + own - allowed, 0.0)

    def share(self, now: float) -> float:
        """The share of the allowed prefill time that the backlog takes; 0 while no rate is known."""
        rate = self.rate(now)
        if rate is None or self._target is None:
            return 0.0
        return self.backlog / rate / (self._target * SHARE_OF_TTFT)

    def _leave(self, prompt: int) -> None:
        self.backlog -= prompt
        if self.backlog == 0:
            self._since = None


def _prompt(lease: Lease) -> int:
    """Prompt tokens that the engine has to compute, without those in its cache."""
    return sum(lease.claim.prompts) - lease.cached_tokens


SHARE_OF_ITL = 0.9
PERCENTILE = 0.8
RECENT_S = 6.0  # over which a pace is read: prompts come in lumps, and each stalls decoding
STALLED_S = 1.0  # without a token: concurrency alone makes no engine that slow
FEWEST_TOKENS = 8  # output of a request before its pace is a reading
LEAST_CUT = 0.85
GROWTH, GROWTH_STEP = 1.08, 1.0
WARY_S = 4.0  # after a slow pace the limit grows at half speed: a lull between two lumps is not room
NEAR_LIMIT = 0.9
ADJUST_EVERY_S = 1.0


class DecodeGuard:
    """How many sequences may decode at once so that four in five keep the target between their tokens.

    A pace is read over the last seconds, not over a request's life: long answers would remember a crowd for
    so long that the limit would be cut far too low. For the same reason nothing is cut while more sequences
    run than the limit allows: the last cut has not yet shown its effect.
    """

    def __init__(self, itl_target_s: float | None) -> None:
        self._target = itl_target_s
        self._finished: deque[tuple[float, float]] = deque()
        self._marks: dict[str, deque[tuple[float, float]]] = {}
        self._adjusted_at = -inf
        self._slow_at = self._read_at = -inf
        self._turned_away = False  # somebody was, since the limit was last adjusted
        self.limit = inf
        self.measured_s: float | None = None

    def aim(self, itl_target_s: float | None) -> None:
        """Use another target from now on; a longer one, or none, lifts the limit."""
        if itl_target_s is None or (self._target is not None and itl_target_s > self._target):
            self.limit = inf
        self._target = itl_target_s

    def ended(self, lease: Lease, now: float) -> None:
        """A lease is over. One that was too short to have been sampled counts as a whole."""
        seen = self._marks.pop(lease.id, None)
        if self._target is None or seen is not None or not lease.streaming:
            return  # without a target nobody reads paces, nor drops them
        first, last = lease.first_token_at, lease.last_token_at
        tokens = lease.output_tokens / lease.claim.sequences
        if first is None or last is None or tokens < FEWEST_TOKENS:
            return
        self._finished.append((now, (last - first) / (tokens - 1.0)))

    def adjust(self, leases: Iterable[Lease], in_flight: int, now: float) -> None:
        """Move the limit, at most once a second. ``in_flight`` counts sequences."""
        if self._target is None or now - self._adjusted_at < ADJUST_EVERY_S:
            return
        self._adjusted_at = now
        full = in_flight >= NEAR_LIMIT * self.limit or in_flight + 1 > self.limit
        binds, self._turned_away = full or self._turned_away, False
        paces = sorted(self._paces(leases, now))
        if not paces:
            if binds and now - self._read_at >= RECENT_S:  # a trial: what is never tried is never known
                self.measured_s, self.limit = None, self._grown()
            return
        self._read_at = now
        self.measured_s = paces[min(int(len(paces) * PERCENTILE), len(paces) - 1)]
        target = self._target * SHARE_OF_ITL
        if self.measured_s > target:
            self._slow_at = now
            if in_flight <= self.limit:
                cut = max(LEAST_CUT, target / self.measured_s)
                self.limit = max(min(self.limit, in_flight + 1.0) * cut, 1.0)
        elif binds:
            grown = self._grown()
            self.limit = grown if now - self._slow_at >= WARY_S else (self.limit + grown) / 2.0

    def turned_away(self) -> None:
        """Somebody was refused because of the limit: it binds.

        Sequences are whole and the limit is not: at 6.9 no more than six run, which is less than 90 % of it.
        """
        self._turned_away = True

    def _grown(self) -> float:
        return self.limit * GROWTH + GROWTH_STEP

    def _paces(self, leases: Iterable[Lease], now: float) -> list[float]:
        """Seconds per token and sequence, of the requests that decode and of those just ended."""
        while self._finished and self._finished[0][0] < now - RECENT_S:
            self._finished.popleft()
        paces = [pace for _, pace in self._finished]
        for lease in leases:
            if lease.streaming and lease.first_token_at is not None:
                pace = self._recent_pace(lease, now)
                if pace is not None:
                    paces.append(pace)
        return paces

    def _recent_pace(self, lease: Lease, now: float) -> float | None:
        tokens = lease.output_tokens / lease.claim.sequences
        marks = self._marks.setdefault(lease.id, deque())
        marks.append((now, tokens))
        while len(marks) > 1 and marks[1][0] <= now - RECENT_S:
            marks.popleft()
        since, before = marks[0]
        made = tokens - before
        if lease.last_token_at is None or now - lease.last_token_at > STALLED_S:
            return None  # its client does not read, or the engine stands still: neither is a crowd
        if made >= FEWEST_TOKENS:
            return (now - since) / made
        # few tokens in a whole stretch are a slow pace; in a short one they say nothing
        return (now - since) / max(made, 1.0) if now - since >= RECENT_S else None


PLATEAU_PAGES = 5
WELL_UNDER = 0.7  # of the pool: with more in use, requests may well wait for blocks
BELIEVED_S = 30.0  # then the inferred limit is tested again, or it would lock itself in


class SlotGuard:
    """The engine's own limit of sequences at once (``max_num_seqs``), which vLLM tells on no page.

    Requests that wait for capacity while the pool is half empty and no prompt is being computed wait for a
    slot; the number that runs meanwhile, page after page, with some ending and others taking their place, is
    the number of slots. While a prompt is being computed nothing can be inferred: that holds up others too.
    """

    def __init__(self, configured: int | None) -> None:
        self._configured = configured
        self._told: int | None = None
        self._plateau: deque[int] = deque(maxlen=PLATEAU_PAGES)
        self._ended = False
        self._inferred: int | None = None
        self._inferred_at = -inf
        self.limit = self._known()

    def configure(self, limit: int | None) -> None:
        """Use the operator's limit from now on; None: the engine's own word, or inferred."""
        self._configured = limit
        self.limit = self._known()

    def _known(self) -> float:
        """Sequences that may be in flight."""
        known = (self._configured, self._told, self._inferred)
        return next((limit for limit in known if limit is not None), inf)

    def told(self, limit: int | None) -> None:
        """The limit by the engine's own description, which some give."""
        self._told = limit
        self.limit = self._known()

    def page(
        self,
        running: int | None,
        for_capacity: int,
        usage_ratio: float | None,
        without_token: int,
        now: float,
    ) -> None:
        """One page of the engine, summed over ranks.

        ``for_capacity`` requests wait for capacity; ``without_token`` of our sequences have no token yet.
        """
        if self._inferred is not None and now - self._inferred_at > BELIEVED_S:
            self._infer(None, now)
        taking_in = without_token > for_capacity
        low = usage_ratio is not None and usage_ratio <= WELL_UNDER
        if running is None or for_capacity == 0 or taking_in or not low:
            self._begin_again()
            return
        if self._plateau and running != self._plateau[-1]:
            self._begin_again()
        self._plateau.append(running)
        if len(self._plateau) == PLATEAU_PAGES and self._ended and running > 0:
            self._infer(running, now)

    def ended(self) -> None:
        """A lease is over: its slot goes to another."""
        self._ended = True

    def forget(self) -> None:
        """The engine is another one."""
        self._infer(None, -inf)
        self._begin_again()

    def _infer(self, limit: int | None, now: float) -> None:
        self._inferred, self._inferred_at = limit, now
        self.limit = self._known()

    def _begin_again(self) -> None:
        self._plateau.clear()
        self._ended = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardStatus:
    """The guards' readings. ``inf`` and None: no limit known."""

    prefill_backlog_tokens: int
    prefill_rate_tokens_per_s: float | None
    decode_limit: float
    decode_pace_s: float | None
    slots: float


@dataclass(frozen=True, slots=True)
class GuardRefusal:
    """Which limit binds, and what is missing: ``seconds`` of backlog, or ``sequences`` to end first."""

    reason: RejectReason
    seconds: float | None = None
    sequences: float = 0.0


class Guards:
    """All guards of one engine."""

    def __init__(
        self, ttft_target_s: float | None, itl_target_s: float | None, max_num_seqs: int | None
    ) -> None:
        self.prefill = PrefillGuard(ttft_target_s)
        self.decode = DecodeGuard(itl_target_s)
        self.slots = SlotGuard(max_num_seqs)

    def aim(self, ttft_target_s: float | None, itl_target_s: float | None, max_num_seqs: int | None) -> None:
        """Other targets and another configured limit from now on."""
        self.prefill.aim(ttft_target_s)
        self.decode.aim(itl_target_s)
        self.slots.configure(max_num_seqs)

    def refuse(self, asked: Claim, ledger: Ledger, now: float, cached: int = 0) -> GuardRefusal | None:
        """The first limit that ``asked`` would exceed; None on an idle engine, whatever the guards say.

        ``cached`` tokens of its prompts are in the engine's cache and need no computing.
        """
        running = ledger.sequences
        if running == 0:
            return None
        if self.prefill.backlog:
            wait = self.prefill.wait(sum(asked.prompts) - cached, now)
            if wait > 0:
                return GuardRefusal(RejectReason.PREFILL_BACKLOG, seconds=wait)
        own, decode, slots = asked.sequences, self.decode.limit, self.slots.limit
        after = running + own
        if after > decode:
            return GuardRefusal(RejectReason.DECODE_CONCURRENCY, sequences=min(after - decode, own))
        if after > slots:
            return GuardRefusal(RejectReason.SEQUENCE_SLOTS, sequences=min(after - slots, own))
        return None

    def turned_away(self, reason: RejectReason) -> None:
        """A request was really refused because of that limit."""
        if reason is RejectReason.DECODE_CONCURRENCY:
            self.decode.turned_away()

    def ended(self, lease: Lease, now: float) -> None:
        """A lease is over, before or after its first token."""
        self.slots.ended()
        if lease.first_token_at is None:
            self.prefill.gone(lease)
        else:
            self.decode.ended(lease, now)

    def shares(self, ledger: Ledger, now: float) -> dict[Limit, float]:
        """The share of each limit that is taken: at 1 it binds."""
        return {
            Limit.PREFILL_BACKLOG: self.prefill.share(now),
            Limit.DECODE_CONCURRENCY: ledger.sequences / self.decode.limit,
            Limit.SEQUENCE_SLOTS: ledger.sequences / self.slots.limit,
        }

    def status(self, now: float) -> GuardStatus:
        """What the guards see now."""
        return GuardStatus(
            prefill_backlog_tokens=self.prefill.backlog,
            prefill_rate_tokens_per_s=self.prefill.rate(now),
            decode_limit=self.decode.limit,
            decode_pace_s=self.decode.measured_s,
            slots=self.slots.limit,
        )
