"""What of this box's standing appears on the data port: headers, readiness by headroom, the overlay.

The standing is taken once a tick, not once a request: a load balancer's view is older than that anyway. Where
nobody reads it (``in_use``), once a second does.
"""

from collections.abc import Callable
from urllib.parse import parse_qs

from kvctl.core.outcomes import MetricsView
from kvctl.fleet.load_report import FAIL_HEADER, HEADER, RequestRate, load_report
from kvctl.fleet.overlay import overlay
from kvctl.fleet.standing import Standing

Header = tuple[bytes, bytes]


class Face:
    """Told of the standing at each tick. ``reports``: whether answers carry Envoy's load report."""

    def __init__(
        self,
        clock: Callable[[], float],
        standing: Standing,
        *,
        reports: bool = False,
        view: MetricsView = MetricsView.ENGINE,
    ) -> None:
        self._clock = clock
        self._reports = reports
        self._view = view
        self._rate = RequestRate()
        self._headers: tuple[Header, ...] = ()
        self.standing = standing
        self.in_use = reports or view is MetricsView.GATE

    def update(self, standing: Standing) -> None:
        """The standing of now."""
        self.standing = standing
        told: list[tuple[str, str]] = []
        if self._reports:
            told.append((HEADER, load_report(standing, self._rate.per_second(self._clock()))))
        if standing.draining:
            told.append(FAIL_HEADER)
        self._headers = tuple((name.encode(), value.encode()) for name, value in told)

    def admitted(self) -> None:
        """A request was let in. A refused one uses nothing: counted, it would draw more to a full box."""
        if self._reports:
            self._rate.admitted(self._clock())

    def headers(self) -> tuple[Header, ...]:
        """What every answer of the data port carries."""
        return self._headers

    def lacking(self, headroom: str) -> str:
        """Why this box has not the share of its budget free that ``headroom`` names; empty: it has.

        Raises ValueError for what is no share of one.
        """
        wanted = float(headroom)
        if not 0 <= wanted <= 1:
            raise ValueError(headroom)
        free = self.standing.headroom_ratio
        return "" if free >= wanted else f"headroom is {free:.0%} of the budget, less than {wanted:.0%}"

    def page(self, body: bytes) -> bytes | None:
        """The engine's metrics page as this view has it; None: as it is."""
        return overlay(body, self.standing) if self._view is MetricsView.GATE else None

    @property
    def overlays(self) -> bool:
        """Whether the engine's page is changed on its way."""
        return self._view is MetricsView.GATE


def ready_with_headroom(ready: tuple[bool, str], target: str, face: Face) -> tuple[bool, str]:
    """Readiness as a probe asks for it: ``/readyz?headroom=0.1`` wants that share of the budget free too."""
    wanted = parse_qs(target.partition("?")[2]).get("headroom")
    if not ready[0] or not wanted:
        return ready
    try:
        lacking = face.lacking(wanted[-1])
    except ValueError:
        return False, f"headroom={wanted[-1][:40]} is no share between 0 and 1, such as 0.1"
    return (False, lacking) if lacking else ready


NOBODY = Standing(
    serving=False, draining=False, reason="starting", headroom_tokens=0, budget_tokens=0, forecast_ratio=0.0,
    usage_ratio=None, running=0, waiting=0,
)  # fmt: skip
