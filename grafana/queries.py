"""Queries that several dashboards ask."""

from grafana.rules import Query

USED = "sum by (instance, engine) (kvctl_engine_kv_usage_ratio{} * kvctl_engine_capacity_tokens{})"


def rate(name: str, by: str, *, function: str = "rate") -> str:
    """A counter's rate (or increase) over the interval, summed."""
    return f"sum by ({by}) ({function}({name}{{}}[$__rate_interval]))"


def quantile(q: float, name: str, by: str = "") -> str:
    """A quantile of a histogram over the interval."""
    labels = f"le, {by}" if by else "le"
    return f"histogram_quantile({q}, sum by ({labels}) (rate({name}_bucket{{}}[$__rate_interval])))"


def quantiles(name: str) -> tuple[Query, ...]:
    """Median, 95th and 99th percentile."""
    return tuple(Query(expr=quantile(q, name), legend=f"p{q * 100:g}") for q in (0.5, 0.95, 0.99))


def gauge(name: str, legend: str, *, by: str = "instance, engine", function: str = "sum") -> Query:
    """A gauge, aggregated."""
    return Query(expr=f"{function} by ({by}) ({name}{{}})", legend=legend)


def nonzero(name: str, by: str) -> Query:
    """A counter's rates by a label, those that are not zero, each under the label's value."""
    return Query(expr=f"{rate(name, by)} > 0", legend=f"{{{{{by}}}}}")
