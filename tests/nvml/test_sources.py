import pytest

from kvctl.gpu.nvml import NvmlSource, make_source
from kvctl.gpu.select import SelectorError


def test_the_setting_names_a_source() -> None:
    assert make_source(("none",), timeout_s=1) is None
    assert isinstance(make_source(("all",), timeout_s=1), NvmlSource)
    assert isinstance(make_source(("0", "GPU-89"), timeout_s=1), NvmlSource)


@pytest.mark.parametrize("gpus", [("H200",), ("0", "none"), ("",)])
def test_what_names_no_card_is_refused(gpus: tuple[str, ...]) -> None:
    with pytest.raises(SelectorError):
        make_source(gpus, timeout_s=1)
