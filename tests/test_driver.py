from __future__ import annotations

import subprocess
import sys

import pytest

from rowstream.device import driver
from rowstream.errors import UnavailableError


def test_importing_the_layer_imports_neither_torch_nor_cuda() -> None:
    script = (
        "import sys, rowstream.device.driver, rowstream.device.kernels\n"
        "assert not {'torch', 'cuda', 'cuda.bindings'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_without_a_gpu_the_reason_is_one_line() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    usable, reason = driver.available()
    assert not usable
    assert "\n" not in reason
    assert reason.startswith("torch ")
    assert not torch.cuda.is_initialized()


def test_results_are_unpacked_and_errors_named() -> None:
    cuda = pytest.importorskip("cuda.bindings.driver")
    results = cuda.CUresult
    assert driver.check((results.CUDA_SUCCESS,), "x") is None
    assert driver.check((results.CUDA_SUCCESS, 7), "x") == 7
    assert driver.check((results.CUDA_SUCCESS, 7, 8), "x") == (7, 8)
    with pytest.raises(RuntimeError, match="launching: CUDA_ERROR_INVALID_VALUE") as failure:
        driver.check((results.CUDA_ERROR_INVALID_VALUE,), "launching")
    assert not isinstance(failure.value, UnavailableError)
    with pytest.raises(UnavailableError, match="waiting: CUDA_ERROR_NOT_SUPPORTED"):
        driver.check((results.CUDA_ERROR_NOT_SUPPORTED,), "waiting")
