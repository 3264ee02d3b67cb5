import sys
from pathlib import Path

import pynvml  # type: ignore[import-untyped]
import pytest

from kvctl.gpu.binding import Code, Nvml, NvmlFailure, load_binding


@pytest.mark.parametrize("code", list(Code))
def test_codes_are_those_of_nvml(code: Code) -> None:
    assert getattr(pynvml, f"NVML_ERROR_{code.name}") == code


def test_the_plain_module_is_used_and_its_version_known() -> None:
    """D06: nvidia-ml-py's module, with its version."""
    binding = load_binding()
    assert binding.module is pynvml
    assert int(binding.version.split(".")[0]) >= 12
    assert binding.shadowed == ""


def test_a_package_in_the_modules_place_is_passed_by(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """D06: the deprecated pynvml package in the way is passed by, without its warning, and named."""
    package = tmp_path / "pynvml"
    package.mkdir()
    (package / "__init__.py").write_text("import warnings\nwarnings.warn('deprecated', FutureWarning)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pynvml")
    binding = load_binding()  # a FutureWarning would be an error here
    assert binding.module.NVML_ERROR_GPU_IS_LOST == Code.GPU_IS_LOST
    assert hasattr(binding.module, "nvmlMemory_v2")
    assert str(package) in binding.shadowed
    assert "remove the deprecated distribution pynvml" in binding.shadowed
    assert load_binding().module is binding.module


def test_what_the_binding_lacks_is_a_failure_with_a_code() -> None:
    with pytest.raises(NvmlFailure, match="not in this binding") as failure:
        Nvml(pynvml).call("nvmlDeviceGetTomorrow")
    assert failure.value.code == Code.FUNCTION_NOT_FOUND


def test_a_call_with_odd_arguments_is_a_failure_too() -> None:
    with pytest.raises(NvmlFailure) as failure:
        Nvml(pynvml).call("nvmlDeviceGetMemoryInfo", 1, 2, 3, 4)
    assert failure.value.code == Code.UNKNOWN
