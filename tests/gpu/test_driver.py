"""The driver's calls, one by one: what a channel builds on."""

from __future__ import annotations

import ctypes
import gc
import mmap
import time
from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from gpu.words import new_stream
from rowstream.device import driver

CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def _soon(condition: Callable[[], bool], limit_s: float = 5.0) -> bool:
    until = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.001)
    return True


def _flag() -> torch.Tensor:
    return torch.zeros(64, dtype=torch.int32).pin_memory()


@pytest.mark.parametrize("captured", [False, True])
def test_a_stream_waits_for_its_flag_and_resets_it(captured: bool) -> None:
    flag, stream = _flag(), new_stream()
    graph = torch.cuda.CUDAGraph()
    if captured:
        with torch.cuda.graph(graph, stream=stream):
            driver.wait_and_reset(torch.cuda.current_stream().cuda_stream, flag.data_ptr())
    for _ in range(3):
        with torch.cuda.stream(stream):
            if captured:
                graph.replay()
            else:
                driver.wait_and_reset(stream.cuda_stream, flag.data_ptr())
        time.sleep(0.02)
        assert not stream.query()
        flag[0] = 1
        assert _soon(stream.query)
        assert flag[0] == 0


def test_pinned_memory_is_copied_from() -> None:
    memory = mmap.mmap(-1, 1 << 20)
    view = np.frombuffer(memory, np.uint8)
    view[:] = np.random.default_rng(0).integers(0, 256, view.size, np.uint8)
    out = torch.zeros(view.size, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    device_address = driver.pin(view.ctypes.data, view.size)
    assert device_address
    stream = new_stream()
    driver.copy_async(stream.cuda_stream, out.data_ptr(), view.ctypes.data, view.size)
    stream.synchronize()
    driver.unpin(view.ctypes.data)
    assert np.array_equal(out.cpu().numpy(), view)


def test_pinning_twice_is_refused_by_name() -> None:
    memory = np.frombuffer(mmap.mmap(-1, 4096), np.uint8)
    driver.pin(memory.ctypes.data, memory.size)
    with pytest.raises(RuntimeError, match="CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"):
        driver.pin(memory.ctypes.data, memory.size)
    driver.unpin(memory.ctypes.data)


def test_a_host_function_runs_at_every_replay() -> None:
    calls: list[int] = []
    function = CALLBACK(calls.append)
    address = ctypes.cast(function, ctypes.c_void_p).value
    assert address
    stream = new_stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        driver.host_function(torch.cuda.current_stream().cuda_stream, address, 77)
    with torch.cuda.stream(stream):
        for _ in range(50):
            graph.replay()
    stream.synchronize()
    assert calls == [77] * 50


def test_what_a_graph_retains_is_let_go_with_it() -> None:
    calls: list[int] = []
    destructor = CALLBACK(calls.append)
    address = ctypes.cast(destructor, ctypes.c_void_p).value
    assert address
    stream = new_stream()
    assert not driver.capturing(stream.cuda_stream)
    assert driver.retain_in_graph(stream.cuda_stream, address, 5) is False
    value = torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        value.add_(1)
        handle = torch.cuda.current_stream().cuda_stream
        assert driver.capturing(handle)
        assert driver.retain_in_graph(handle, address, 88)
        value.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    time.sleep(0.05)
    assert calls == []
    del graph
    gc.collect()
    torch.cuda.synchronize()
    assert _soon(lambda: calls == [88])


def test_a_device_has_a_name_and_a_key() -> None:
    usable, reason = driver.available()
    assert usable
    found = driver.attributes(0)
    assert found.name in reason
    assert found.compute_capability == torch.cuda.get_device_capability(0)
    assert found.multiprocessors == torch.cuda.get_device_properties(0).multi_processor_count
    assert len(driver.device_uuid(0)) == 32
    assert driver.driver_version().split()[0].isdigit()
