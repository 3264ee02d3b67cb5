"""The data plane's reports, translated into metrics; apart from both, since it knows both sides."""

import logging

from kvctl import logs
from kvctl.core.outcomes import DECISION_OF, ChoiceReason, Decision, EndReason, ProxyFault
from kvctl.metrics import Metrics
from kvctl.metrics.catalog import OTHER
from kvctl.proxy.seams import Served

access = logging.getLogger(logs.ACCESS)

_UPSTREAM_ERRORS = {
    ProxyFault.CONNECT_FAILED: "connect",
    ProxyFault.UPSTREAM_BROKE: "broken",
    ProxyFault.UPSTREAM_TIMEOUT: "timeout",
}
_COMPLETE = frozenset({EndReason.FINISHED, EndReason.CAPPED})


class ProxyReports:
    """A ``ProxyMetrics`` that counts into ``Metrics``."""

    def __init__(self, metrics: Metrics, *, access_log: bool = False) -> None:
        self.counted = metrics.counted
        self.decided = metrics.decided
        self._metrics = metrics
        self._access_log = access_log

    def served(self, record: Served) -> None:
        """A request is over."""
        end, metrics = record.end, self._metrics
        metrics.request(record.route, end or _outcome(record))
        if self._access_log:
            _log_access(record)
        if end in _COMPLETE:
            self._answered(record)
        elif end is EndReason.ENGINE_REFUSED:
            metrics.upstream_error("status")
        if end is EndReason.CLIENT_GONE or record.status == 0:
            metrics.client_gone(_phase(record))

    def fault(self, word: ProxyFault) -> None:
        """Something went wrong."""
        self._metrics.fault(word)
        if word in _UPSTREAM_ERRORS:
            self._metrics.upstream_error(_UPSTREAM_ERRORS[word])

    def chosen(self, engine: str, reason: ChoiceReason) -> None:
        """A request was sent to ``engine``'s gate, which was chosen of several gates."""
        self._metrics.chosen(engine, reason)

    def _answered(self, record: Served) -> None:
        first_s = record.first_byte_s
        if first_s is None:
            return
        self._metrics.first_token(first_s)
        if record.stream and record.output_tokens is not None and record.output_tokens > 1:
            self._metrics.next_token((record.seconds - first_s) / (record.output_tokens - 1))


def _log_access(record: Served) -> None:
    logs.event(
        access,
        logging.INFO,
        "request",
        f"{record.method} {record.route} {record.status}",
        id=record.request_id,
        outcome=_outcome(record),
        seconds=record.seconds,
        first_byte_s=record.first_byte_s,
        prompt_tokens=record.prompt_tokens,
        output_tokens=record.output_tokens,
        reason=record.reject,
        engine=record.engine,
    )


# Of requests that the gate never judged: other routes, and what was refused on the way to it.
_UNJUDGED = {
    0: EndReason.CLIENT_GONE,
    404: "not_found",
    405: "not_found",
    500: OTHER,  # a defect; the engine's own 500 came with a body
    503: Decision.UNAVAILABLE,
    504: EndReason.TIMEOUT,
}


def _outcome(record: Served) -> str:
    if record.end is not None:
        return record.end
    if record.reject is not None:
        return DECISION_OF[record.reject]
    if record.status >= 500 and record.first_byte_s is not None:
        return EndReason.ENGINE_ERROR
    usual = (
        "passed" if record.status < 400 else "bad_request" if record.status < 500 else EndReason.ENGINE_ERROR
    )
    return _UNJUDGED.get(record.status, usual)


def _phase(record: Served) -> str:
    if record.end is None:
        return "request"
    return "waiting" if record.first_byte_s is None else "streaming"
