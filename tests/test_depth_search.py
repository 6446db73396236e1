"""The choice of depth and block, on devices made of arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from rowstream import depth_search
from rowstream.depth_search import DEPTHS, search


class Device:
    """A clock, and tables that take as long as a device of given rates would."""

    def __init__(self, rate: Callable[[int, int], float], monkeypatch: pytest.MonkeyPatch) -> None:
        self.rate = rate
        self.now = 0.0
        self.closed: list[tuple[int, int]] = []
        self.opened: list[tuple[int, int]] = []
        clock = SimpleNamespace(perf_counter=lambda: self.now)
        monkeypatch.setattr(depth_search, "time", clock)

    def open(self, depth: int, block: int) -> Any:
        self.opened.append((depth, block))
        return Table(self, depth, block)


class Table:
    num_rows = 1000

    def __init__(self, device: Device, depth: int, block: int) -> None:
        self.device, self.depth, self.block = device, depth, block
        self.done = 0

    def gather(self, ids: Any, groups: Any, out: Any) -> None:
        assert ids.shape == (len(ids), 1)
        assert out.shape == (len(ids), 1, self.block)
        assert 0 <= ids.min() <= ids.max() < self.num_rows
        self.done += len(ids)
        self.device.now += len(ids) / self.device.rate(self.depth, self.block)

    def counters(self) -> dict[str, int]:
        return {"reads": self.done}

    def close(self) -> None:
        self.device.closed.append((self.depth, self.block))


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Device]]:
    made: list[Device] = []

    def make(rate: Callable[[int, int], float]) -> Device:
        made.append(Device(rate, monkeypatch))
        return made[-1]

    yield make
    for one in made:
        assert sorted(one.closed) == sorted(one.opened)


@pytest.mark.parametrize(
    ("best_at", "chosen"), [(16, 16), (40, 64), (64, 64), (256, 256), (512, 512)]
)
def test_the_smallest_depth_that_is_as_good_as_the_best(
    device: Callable[..., Device], best_at: int, chosen: int
) -> None:
    made = device(lambda depth, block: 1000.0 * min(depth, best_at))
    found = search(made.open, (512,), 0.25)
    assert (found.queue_depth, found.block) == (chosen, 512)
    assert found.reads_per_s == pytest.approx(1000.0 * best_at, rel=0.01)
    assert found.p50_us == pytest.approx(16e6 / (1000.0 * min(16, best_at)))


@pytest.mark.parametrize(("gain", "chosen"), [(1.02, 64), (1.04, 128)])
def test_three_percent_are_not_worth_twice_the_depth(
    device: Callable[..., Device], gain: float, chosen: int
) -> None:
    made = device(lambda depth, block: 1e5 * min(depth, 64) / 64 * (gain if depth > 64 else 1.0))
    assert search(made.open, (512,), 0.25).queue_depth == chosen


def test_depths_that_the_kernel_does_not_queue_are_not_tried(device: Callable[..., Device]) -> None:
    made = device(lambda depth, block: 1000.0 * depth)
    found = search(made.open, (512,), 0.25, most_depth=100)
    assert found.queue_depth == 64
    assert max(depth for depth, _ in made.opened) == 64


def test_a_measurement_that_something_disturbed_decides_nothing(
    device: Callable[..., Device],
) -> None:
    made = device(lambda depth, block: 60_000.0 if depth == 16 else 40_000.0)
    found = search(made.open, (512, 4096), 0.25)
    assert (found.queue_depth, found.block) == (None, 512)
    assert dict(found.depth_rates)[16] == pytest.approx(60_000)


def test_of_several_turns_the_best_counts(device: Callable[..., Device]) -> None:
    turns = dict.fromkeys(DEPTHS, 0)

    def rate(depth: int, block: int) -> float:
        turns[depth] += 1
        slowed = depth == 64 and turns[depth] != 2  # but for one turn something else reads
        return 500.0 * min(depth, 64) * (0.4 if slowed else 1.0)

    assert search(device(rate).open, (512,), 0.25).queue_depth == 64


@pytest.mark.parametrize(
    ("larger", "block"), [(0.9, 512), (1.0, 512), (1.02, 512), (1.05, 4096), (2.0, 4096)]
)
def test_a_larger_block_has_to_be_faster(
    device: Callable[..., Device], larger: float, block: int
) -> None:
    made = device(lambda depth, size: 1000.0 * min(depth, 64) * (larger if size == 4096 else 1))
    found = search(made.open, (512, 4096), 0.25)
    assert (found.queue_depth, found.block) == (64, block)
    assert {size for size, _ in found.block_rates} == {512, 4096}


@pytest.mark.parametrize("rate", [100.0, 3_000.0, 20_000.0, 100_000.0, 2e6])
def test_the_budget_is_kept(device: Callable[..., Device], rate: float) -> None:
    made = device(lambda depth, block: rate * min(depth, 64) / 64)
    search(made.open, (512, 4096), 0.25)
    # a device too slow for its 16 reads takes what those take
    assert made.now <= max(0.3, 1.01 * 16 / (rate / 4))


def test_a_disk_of_a_hundred_reads_a_second_decides_nothing(device: Callable[..., Device]) -> None:
    made = device(lambda depth, block: 100.0)
    found = search(made.open, (512, 4096), 0.25)
    assert found.queue_depth is None
    assert [depth for depth, _ in found.depth_rates] == [16]
    assert found.reads_per_s == pytest.approx(100)
