"""How hard the property tests try."""

from hypothesis import settings


def examples(usual: int) -> int:
    """``usual``, scaled by the profile that is in force: its examples are per cent of the usual ones."""
    return max(usual * settings().max_examples // 100, 5)
