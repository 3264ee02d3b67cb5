"""A body of no known form: all that is written counts as prompt, and the largest limit found wins."""

from kvctl.engines.base import Route
from kvctl.proxy.limits import Fields
from kvctl.proxy.readers.base import Asked, Body, Counted, Facts, bounded_by_all

_OUTPUT_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "max_length")
_NESTED = ("parameters", "sampling_params", "generation_config")


async def read_any(facts: Facts, route: Route, data: Body, size: int) -> Counted:
    """Bounded by everything that the body says."""
    del route, size
    places = [data, *(value for key in _NESTED if isinstance(value := data.get(key), dict))]
    outputs = [v for p in places for key in _OUTPUT_LIMITS if (v := Fields(p).integer(key)) is not None]
    copies = [v for p in places for key in ("n", "best_of") if (v := Fields(p).integer(key)) is not None]
    largest = max(outputs, default=0)
    asked = Asked(output=largest if largest > 0 else None, n=max(1, *copies, 1))
    return asked, bounded_by_all(facts, data)
