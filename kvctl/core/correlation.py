"""How far the lengths of the answers in flight vary together: ``rho`` in ``curves``.

With ``n`` answers of a class known, its S is itself uncertain by S (1 - S) / n (Greenwood's formula, where
nobody is censored). All leases of the class share that error, so a share ``1 / n`` of the variance of each is
in common. Known are those that came to their end or their cap; one that was cut says little of lengths. The
prior counts as ``PRIOR_WEIGHT`` answers, and the mean is taken over those in flight:

    rho = min(RHO_MOST, RHO_LEAST + mean of 1 / (PRIOR_WEIGHT + n))

``RHO_LEAST`` remains however much is known: lengths drift. Where answers fail to end, what is known is of
other times (``frailty``), and rho is ``RHO_MOST``.
"""

from collections.abc import Iterable

from kvctl.core.prior import PRIOR_WEIGHT

RHO_MOST = 0.03  # with it a hundred leases spread twice as far as independent lengths do
RHO_LEAST = 0.01


def correlation(classes: Iterable[tuple[int, int]]) -> float:
    """``rho``, in [RHO_LEAST, RHO_MOST]; of each class: leases in flight, whole answers remembered."""
    leases, doubt = 0, 0.0
    for in_flight, answers in classes:
        leases += in_flight
        doubt += in_flight / (PRIOR_WEIGHT + answers)
    return min(RHO_MOST, RHO_LEAST + doubt / leases) if leases else RHO_MOST
