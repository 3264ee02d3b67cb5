"""Tenants: their quotas, and the share of what is in flight that each of them is owed.

A quota (``Quotas``) limits one tenant, whatever room there is. A share (``Shares``) counts only where tenants
contend: nobody is refused because of it while nobody else wants the room.

Shares are weighted, in KV tokens x seconds, and enforced in two ways: in the queue the tenant that has used
least by its weight is next; without a queue, room is kept for a tenant that is below its share and was turned
away or at work in the last seconds. How much is kept follows what that tenant wanted of late, and is never
more than its share.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf

from kvctl.core.case import Case, Obstacle
from kvctl.core.claim import Shape
from kvctl.core.outcomes import Priority, RejectReason
from kvctl.core.status import TenantStatus

DEFAULT = "default"
OTHER = "other"
MOST_LABELS = 20
MINUTE_S = 60.0
FREED_S = 10.0  # over which the rate is measured at which a tenant's own tokens come free
WANT_S = 10.0  # time constant with which what a tenant wanted is forgotten
USED_S = 30.0  # the same for what it used
ACTIVE_S = 10.0  # after its last request, during which room for its next ones is kept
MOST_EXPECTED = 4096  # refused requests of a tenant: who hammers is not expected more than that often
SPARE = 3.0  # requests for which room is kept: arrivals come in clusters
LEARN = 0.2
RETURNS_S = 0.5  # a refused caller that is later than this is no longer expected
_NEGLIGIBLE = 1.0  # KV tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantRule:
    """What the operator says of one tenant. None: no limit."""

    name: str
    weight: float = 1.0
    may_prioritise: bool = False
    tokens_in_flight: int | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class OverQuota:
    """The quota that binds, and the seconds until it frees enough; None: not known yet."""

    reason: RejectReason
    seconds: float | None


@dataclass(slots=True)
class _Spent:
    """What one request took out of its tenant's minute."""

    at: float
    tokens: float


@dataclass(slots=True)
class _Account:
    leases: int = 0
    in_flight: float = 0.0  # KV tokens
    spent: deque[_Spent] = field(default_factory=deque)
    freed: deque[tuple[float, float]] = field(default_factory=deque)

    def forget(self, now: float) -> None:
        while self.spent and self.spent[0].at <= now - MINUTE_S:
            self.spent.popleft()
        while self.freed and self.freed[0][0] <= now - FREED_S:
            self.freed.popleft()


class Quotas:
    """Limits of each tenant over what it has in flight and over its last minute. Tokens are KV tokens.

    A request takes what the forecast says that it will hold; its end corrects that to what it did hold. One
    larger than a whole quota is let in when the quota is untouched: otherwise it could return for ever.
    """

    def __init__(self, rules: Mapping[str, TenantRule]) -> None:
        self._rules = rules
        self._accounts: dict[str, _Account] = {}
        self.charged: dict[str, tuple[str, float, _Spent]] = {}  # by lease: tenant, tokens, spent

    def obey(self, rules: Mapping[str, TenantRule]) -> None:
        """Other rules from now on."""
        self._rules = rules

    def refuse(self, tenant: str, tokens: float, now: float) -> OverQuota | None:
        """The first quota that a request of ``tokens`` KV tokens would exceed."""
        rule, account = self._rules.get(tenant), self._accounts.get(tenant)
        if rule is None or account is None:
            return None
        account.forget(now)
        most = rule.requests_per_minute
        if most is not None and len(account.spent) >= most:
            frees_at = account.spent[len(account.spent) - most].at + MINUTE_S
            return OverQuota(RejectReason.TENANT_REQUESTS_PER_MINUTE, frees_at - now)
        most = rule.tokens_per_minute
        if most is not None and (wait := _until_spent(account.spent, tokens, most, now)) > 0:
            return OverQuota(RejectReason.TENANT_TOKENS_PER_MINUTE, wait)
        most = rule.tokens_in_flight
        if most is not None and account.in_flight > _NEGLIGIBLE and account.in_flight + tokens > most:
            missing = min(account.in_flight + tokens - most, account.in_flight)
            return OverQuota(RejectReason.TENANT_TOKENS_IN_FLIGHT, _until_freed(account.freed, missing, now))
        return None

    def opened(self, lease_id: str, tenant: str, tokens: float, now: float) -> None:
        """A lease was charged."""
        account = self._accounts.setdefault(tenant, _Account())
        spent = _Spent(now, tokens)
        account.spent.append(spent)
        account.leases += 1
        account.in_flight += tokens
        self.charged[lease_id] = tenant, tokens, spent

    def ended(self, lease_id: str, held_tokens: int, now: float) -> tuple[str, float] | None:
        """A lease ended; its tenant and what it was charged."""
        opened = self.charged.pop(lease_id, None)
        if opened is None:
            return None
        tenant, tokens, spent = opened
        account = self._accounts[tenant]
        account.leases -= 1
        account.in_flight -= tokens
        account.freed.append((now, tokens))
        spent.tokens = held_tokens
        account.forget(now)
        if not account.leases:
            account.in_flight = 0.0  # a sum of floats: set to exactly zero when nothing runs
        return tenant, tokens

    def in_flight(self, tenant: str) -> float:
        """KV tokens that the tenant's leases are charged."""
        account = self._accounts.get(tenant)
        return 0.0 if account is None else account.in_flight


def _until_spent(spent: deque[_Spent], tokens: float, most: float, now: float) -> float:
    """Seconds until enough of the spent tokens are a minute old; 0: it fits now."""
    total, wait = sum(one.tokens for one in spent), 0.0
    for one in spent:
        if total <= 0.0 or total + tokens <= most:
            break
        total -= one.tokens
        wait = one.at + MINUTE_S - now
    return wait


def _until_freed(freed: deque[tuple[float, float]], missing: float, now: float) -> float | None:
    total = sum(tokens for _, tokens in freed)
    if total <= 0.0:
        return None
    return missing * max(now - freed[0][0], 1.0) / total


@dataclass(slots=True)
class _Stake:
    """What one tenant holds, is expected to come back for, wanted of late, and has used."""

    held: float = 0.0
    expected: deque[tuple[float, float]] = field(default_factory=deque)  # (until, tokens) of refused requests
    awaited: float = 0.0  # tokens of these
    want: float = 0.0
    want_at: float = -inf
    typical: float = 0.0  # tokens of its usual request
    came_at: float = -inf
    used: float = 0.0  # token-seconds, fading
    used_at: float = -inf

    def wants(self, now: float) -> float:
        while self.expected and self.expected[0][0] < now:
            self.returned()
        demand = self.held + self.awaited
        self.want = max(demand, self.want * exp(-max(now - self.want_at, 0.0) / WANT_S))
        self.want_at = now
        return self.want + (SPARE * self.typical if now - self.came_at < ACTIVE_S else 0.0)

    def expect(self, tokens: float, until: float) -> None:
        if len(self.expected) == MOST_EXPECTED:
            self.returned()
        self.expected.append((until, tokens))
        self.awaited += tokens

    def returned(self) -> None:
        """The one expected for longest is back, or not expected any more."""
        _, tokens = self.expected.popleft()
        self.awaited = self.awaited - tokens if self.expected else 0.0

    def idle(self, now: float) -> bool:
        """Whether nothing is left that anybody could be owed, or has used."""
        quiet = now - self.came_at >= ACTIVE_S and self.held == 0.0 and not self.expected
        return quiet and self.wants(now) <= _NEGLIGIBLE and self.use(now) <= _NEGLIGIBLE

    def came(self, tokens: float, now: float) -> None:
        self.came_at = now
        self.typical += (tokens - self.typical) * (LEARN if self.typical else 1.0)

    def use(self, now: float) -> float:
        fade = exp(-max(now - self.used_at, 0.0) / USED_S)
        self.used = self.used * fade + self.held * USED_S * (1.0 - fade)
        self.used_at = now
        return self.used


class Shares:
    """How much of what may be in flight each tenant is owed."""

    def __init__(self, rules: Mapping[str, TenantRule]) -> None:
        self._rules = rules
        self._stakes: dict[str, _Stake] = {}
        self._wanted: dict[str, float] = {}  # by each, at most: what is wanted fades until it is touched
        self._wanted_by_all = 0.0

    def obey(self, rules: Mapping[str, TenantRule]) -> None:
        """Other rules from now on."""
        self._rules = rules

    def weight(self, tenant: str) -> float:
        """The tenant's weight."""
        rule = self._rules.get(tenant) or self._rules.get(DEFAULT)
        return 1.0 if rule is None else rule.weight

    def opened(self, tenant: str, tokens: float, now: float) -> None:
        """A lease of ``tokens`` KV tokens was charged; it counts as the return of a refused request."""
        stake = self._stakes.setdefault(tenant, _Stake())
        stake.use(now)
        stake.held += tokens
        stake.came(tokens, now)
        if stake.expected:
            stake.returned()
        self._touched(tenant, stake, now)

    def ended(self, tenant: str, tokens: float, now: float) -> None:
        """It is over."""
        stake = self._stakes.setdefault(tenant, _Stake())
        stake.use(now)
        self._touched(tenant, stake, now)
        stake.held = max(stake.held - tokens, 0.0)
        if stake.held < _NEGLIGIBLE:
            stake.held = 0.0

    def expected(self, tenant: str, tokens: float, in_s: float, now: float) -> None:
        """A request did not get in, and is expected back in ``in_s`` seconds."""
        stake = self._stakes.setdefault(tenant, _Stake())
        stake.came(tokens, now)
        stake.expect(tokens, now + in_s + RETURNS_S)
        self._touched(tenant, stake, now)

    def _touched(self, tenant: str, stake: _Stake, now: float) -> None:
        wants = stake.wants(now)
        self._wanted_by_all += wants - self._wanted.get(tenant, 0.0)
        self._wanted[tenant] = wants

    def _look(self, now: float) -> None:
        """What each wants now; of who has not come for long, nothing is kept."""
        self._stakes = {name: stake for name, stake in self._stakes.items() if not stake.idle(now)}
        self._wanted = {name: stake.wants(now) for name, stake in self._stakes.items()}
        self._wanted_by_all = sum(self._wanted.values())

    def owed_to_others_at_most(self, tenant: str) -> float:
        """As ``owed_to_others``, without a look at each of them: the most that it can be."""
        return self._wanted_by_all - self._wanted.get(tenant, 0.0)

    def used(self, tenant: str, now: float) -> float:
        """KV tokens x seconds of late, by weight: the tenant with the least is next."""
        stake = self._stakes.get(tenant)
        return 0.0 if stake is None else stake.use(now) / self.weight(tenant)

    def owed_to_others(self, tenant: str, tokens: float, peak: float, budget: float, now: float) -> float:
        """KV tokens of ``budget`` to keep free of a request of ``tenant``, for tenants below their share.

        ``peak`` is the forecast peak of what is in flight. It is less than the sum of what the leases are
        charged one by one, so everything is scaled by it.
        """
        self._look(now)
        held_by_all = sum(stake.held for stake in self._stakes.values())
        scale = min(peak / held_by_all, 1.0) if held_by_all > 0.0 else 1.0
        wants = {name: scale * want for name, want in self._wanted.items() if scale * want > _NEGLIGIBLE}
        wants[tenant] = inf
        level = self._level(wants, budget)
        own = self._stakes.get(tenant)
        if scale * ((own.held if own else 0.0) + tokens) <= level * self.weight(tenant):
            return 0.0
        return sum(
            max(min(want, level * self.weight(name)) - scale * self._stakes[name].held, 0.0)
            for name, want in wants.items()
            if name != tenant
        )

    def _level(self, wants: Mapping[str, float], budget: float) -> float:
        """Tokens per unit of weight: what a tenant does not want of its share goes to the others."""
        weighed = [(want, self.weight(name)) for name, want in wants.items()]
        left, weights = budget, sum(weight for _, weight in weighed)
        for want, weight in sorted(weighed, key=lambda one: one[0] / one[1]):
            if want > left / weights * weight:
                break
            left -= want
            weights -= weight
        return left / weights if weights > 0.0 else inf


class Tenants:
    """Quotas and shares of one engine's tenants. ``on`` False: no rules, tenants are not distinguished."""

    def __init__(self, rules: Sequence[TenantRule]) -> None:
        self.quotas = Quotas({})
        self.shares = Shares({})
        self.obey(rules)

    def obey(self, rules: Sequence[TenantRule]) -> None:
        """Use other rules from now on; what is in flight stays counted where it was."""
        self._rules = {rule.name: rule for rule in rules}
        self._labelled = {DEFAULT, *list(self._rules)[:MOST_LABELS]}
        self.on = bool(rules)
        self.quotas.obey(self._rules)
        self.shares.obey(self._rules)

    def known(self, tenant: str) -> str:
        """The tenant whose rule applies: ``default`` for an unknown one; "" without rules."""
        if not self.on:
            return ""
        return tenant if tenant in self._rules else DEFAULT

    def label(self, tenant: str) -> str:
        """The tenant's name in metrics: the first twenty of the settings by name, the rest together."""
        if not self.on:
            return ""
        return tenant if tenant in self._labelled else OTHER

    @property
    def labels(self) -> tuple[str, ...]:
        """All that ``label`` may say."""
        if not self.on:
            return ()
        named = [name for name in self._rules if name != DEFAULT][:MOST_LABELS]
        return (*named, DEFAULT, *((OTHER,) if len(self._rules) > MOST_LABELS else ()))

    def priority(self, shape: Shape) -> Priority:
        """The class of a request: as the caller asks, if its tenant may choose."""
        if not (self.on and shape.priority):
            return Priority.NORMAL
        rule = self._rules.get(self.known(shape.tenant))
        if rule is None or not rule.may_prioritise:
            return Priority.NORMAL
        return Priority.HIGH if shape.priority < 0 else Priority.LOW

    def over_quota(self, case: Case, now: float) -> Obstacle | None:
        """The quota that it would pass."""
        over = self.quotas.refuse(case.tenant, case.own, now)
        return None if over is None else Obstacle(over.reason, tokens=case.own, seconds=over.seconds)

    def owed_to_others(self, case: Case, peak: float, budget: float, now: float) -> Obstacle | None:
        """The obstacle if the room that it would take of ``budget`` KV tokens is owed to others."""
        if case.peak + self.shares.owed_to_others_at_most(case.tenant) <= budget:
            return None
        owed = self.shares.owed_to_others(case.tenant, case.own, peak, budget, now)
        missing = case.peak + owed - budget
        return Obstacle(RejectReason.TENANT_SHARE, tokens=missing) if owed > 0.0 and missing > 0.0 else None

    def expected(self, case: Case, in_s: float, now: float) -> None:
        """It waits, or was turned away and will return: count what its tenant wants."""
        self.shares.expected(case.tenant, case.own, in_s, now)

    def status(self, now: float) -> tuple[TenantStatus, ...]:
        """The status of each tenant, by label."""
        return tuple(self._status(label, now) for label in self.labels if label != OTHER)

    def _status(self, tenant: str, now: float) -> TenantStatus:
        return TenantStatus(
            tenant=tenant,
            in_flight_tokens=self.quotas.in_flight(tenant),
            used_token_seconds=self.shares.used(tenant, now),
        )

    def opened(self, lease_id: str, tenant: str, tokens: float, now: float) -> None:
        """A lease was charged."""
        self.quotas.opened(lease_id, tenant, tokens, now)
        self.shares.opened(tenant, tokens, now)

    def ended(self, lease_id: str, held_tokens: int, now: float) -> None:
        """A lease ended."""
        charged = self.quotas.ended(lease_id, held_tokens, now)
        if charged is not None:
            self.shares.ended(*charged, now)
