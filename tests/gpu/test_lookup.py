"""The lookup as a model sees it: every dtype, captured, compiled, in two halves, sharded."""

from __future__ import annotations

import threading
import time

import pytest

pytest.importorskip("torch")

import torch

from gpu.stores import CUDA, HEADS, ITEM_BYTES, ROWS, VALUES, OpenStore, same
from gpu.words import new_stream
from rowstream.device.embedding import StreamedEmbedding
from rowstream.device.lookup import Lookup, LookupOptions
from rowstream.sharding import Shard


def both(
    lookup: Lookup, ids: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the GPU gives, into a poisoned output, and what the CPU gives."""
    last = lookup.store.row_bytes if dtype == torch.uint8 else VALUES
    on_gpu = torch.full((*ids.shape, last), 77, dtype=dtype, device=CUDA)
    on_cpu = torch.full((*ids.shape, last), 33, dtype=dtype)
    lookup(ids.to(CUDA), on_gpu)
    lookup(ids, on_cpu)
    return on_gpu, on_cpu


@pytest.mark.parametrize("codec", ITEM_BYTES)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rounding", ["f32", "out"])
def test_every_dtype(codec: str, dtype: torch.dtype, rounding: str, open_store: OpenStore) -> None:
    lookup = Lookup(open_store(codec), LookupOptions(rounding=rounding))
    for shape in [(1,), (3, 5), (2000,)]:
        ids = torch.randint(-1, ROWS, (*shape, HEADS))
        assert same(*both(lookup, ids, dtype))
        assert same(*both(lookup, ids.to(torch.int32), dtype))
    lookup.check()


def test_a_long_prompt_in_pieces(open_store: OpenStore) -> None:
    lookup = Lookup(open_store(), LookupOptions(channel_bytes=4 << 20))
    ids = torch.randint(-1, ROWS, (7001, HEADS))
    assert same(*both(lookup, ids, torch.bfloat16))
    live = torch.tensor(6543, dtype=torch.int32)
    on_gpu = torch.full((7001, HEADS, VALUES), 77.0, device=CUDA)
    on_cpu = torch.full((7001, HEADS, VALUES), 33.0)
    lookup(ids.to(CUDA), on_gpu, live.to(CUDA))
    lookup(ids, on_cpu, live)
    assert same(on_gpu, on_cpu)
    assert not on_cpu[6543:].any()


def test_captured_with_start_and_finish_apart(open_store: OpenStore) -> None:
    lookup = Lookup(open_store())
    lookup.warm_up(torch.device(CUDA), [torch.bfloat16])
    ids = torch.randint(ROWS, (4, HEADS), device=CUDA)
    out = torch.zeros((4, HEADS, VALUES), dtype=torch.bfloat16, device=CUDA)
    work = torch.randn((512, 512), device=CUDA)
    work @ work  # the library's handle is not made during a capture
    side = new_stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        ids.add_(11).remainder_(ROWS)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            started = lookup.start(ids)
        work @ work
        with torch.cuda.stream(side):
            lookup.finish(started, out)
        main.wait_stream(side)
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    expected = torch.empty((4, HEADS, VALUES), dtype=torch.bfloat16)
    lookup(ids.cpu(), expected)
    assert same(out, expected)
    lookup.check()


def test_started_on_one_stream_and_finished_on_another(open_store: OpenStore) -> None:
    lookup = Lookup(open_store())
    side = new_stream()
    for _ in range(100):
        ids = torch.randint(ROWS, (3, HEADS))
        on_gpu = ids.to(CUDA)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            started = lookup.start(on_gpu)
        out = torch.empty((3, HEADS, VALUES), device=CUDA)
        lookup.finish(started, out)
        expected = torch.empty((3, HEADS, VALUES))
        lookup(ids, expected)
        assert same(out, expected)


def test_a_start_that_is_dropped_harms_no_other(open_store: OpenStore) -> None:
    lookup = Lookup(open_store())
    for _ in range(3):
        lookup.start(torch.randint(ROWS, (2, HEADS), device=CUDA))  # never finished
        for _ in range(20):
            assert same(*both(lookup, torch.randint(-1, ROWS, (3, HEADS)), torch.bfloat16))
    started = lookup.start(ids := torch.randint(ROWS, (2, HEADS), device=CUDA))
    out = torch.empty((2, HEADS, VALUES), device=CUDA)
    lookup.finish(started, out)
    with pytest.raises(RuntimeError, match="one finish"):
        lookup.finish(started, out)
    with pytest.raises(TypeError, match="dtype needs"):
        lookup(ids, out.double())
    assert same(*both(lookup, torch.randint(-1, ROWS, (3, HEADS)), torch.bfloat16))
    lookup.check()


def test_faults_of_a_graph_that_is_gone_are_counted_once(open_store: OpenStore) -> None:
    lookup = Lookup(open_store())
    lookup.warm_up(torch.device(CUDA), [torch.float32])
    ids = torch.full((1, HEADS), ROWS, device=CUDA)
    out = torch.empty((1, HEADS, VALUES), device=CUDA)
    for _ in range(5):
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            lookup(ids, out)
        graph.replay()
        torch.cuda.synchronize()
        with pytest.raises(IndexError):
            lookup.check()
        del graph
        for _ in range(20):
            lookup.check()
            time.sleep(0.01)


def test_an_id_outside_the_table(open_store: OpenStore) -> None:
    lookup = Lookup(open_store())
    ids = torch.randint(ROWS, (2, HEADS), device=CUDA)
    ids[1, 7] = ROWS
    out = torch.empty((2, HEADS, VALUES), device=CUDA)
    lookup(ids, out)
    torch.cuda.synchronize()
    assert out.isnan().all()
    with pytest.raises(IndexError, match=f"row id {ROWS} at position 23"):
        lookup.check()
    ids[1, 7] = 0
    lookup(ids, out)
    lookup.check()


def test_arguments_that_do_not_fit(open_store: OpenStore) -> None:
    lookup = Lookup(open_store())
    ids = torch.zeros((2, HEADS), dtype=torch.int64, device=CUDA)
    with pytest.raises(TypeError, match="ids need int64 or int32"):
        lookup(ids.float(), torch.empty((2, HEADS, VALUES), device=CUDA))
    with pytest.raises(ValueError, match="a last axis of 16 heads"):
        lookup(ids[:, :3], torch.empty((2, 3, VALUES), device=CUDA))
    with pytest.raises(ValueError, match="out needs shape"):
        lookup(ids, torch.empty((2, HEADS, VALUES + 1), device=CUDA))
    with pytest.raises(ValueError, match="out needs shape"):
        lookup(ids, torch.empty((2, HEADS, VALUES)))


@pytest.mark.parametrize("place", ["streamed", "pinned", "device"])
def test_a_thread_that_has_called_nothing_of_cuda_yet(place: str, open_store: OpenStore) -> None:
    # the kernels are there already, whose loading would give the thread a context
    Lookup(open_store()).warm_up(torch.device(CUDA))
    lookup = Lookup(open_store(), LookupOptions(place=place))
    ids = torch.randint(ROWS, (3, HEADS), device=CUDA)
    out = torch.empty((3, HEADS, VALUES), device=CUDA)
    torch.cuda.synchronize()
    failures: list[BaseException] = []

    def look_up() -> None:
        try:
            lookup(ids, out)
        except BaseException as failure:
            failures.append(failure)

    for _ in range(2):  # the way is made, and found
        out.zero_()
        torch.cuda.synchronize()
        thread = threading.Thread(target=look_up)
        thread.start()
        thread.join()
        assert failures == []
        torch.cuda.synchronize()
        expected = torch.empty((3, HEADS, VALUES))
        lookup(ids.cpu(), expected)
        assert same(out, expected)
    lookup.check()


@pytest.mark.parametrize("by", ["heads", "rows"])
@pytest.mark.parametrize("world", [2, 3, 8])
def test_ranks_add_up(by: str, world: int, open_store: OpenStore) -> None:
    whole = Lookup(open_store())
    ids = torch.randint(-1, ROWS, (50, HEADS))
    expected = torch.empty((50, HEADS, VALUES), dtype=torch.float32)
    whole(ids, expected)
    total = torch.zeros((50, HEADS, VALUES), device=CUDA)
    for rank in range(world):
        lookup = Lookup(
            open_store(shard=Shard(rank, world, by)), LookupOptions(channel_bytes=1 << 20)
        )
        part = torch.full((50, HEADS, VALUES), 77.0, device=CUDA)
        lookup(ids.to(CUDA), part)
        total += part
        lookup.check()
    # a sum of zeroes has no sign
    torch.testing.assert_close(total.cpu(), expected, rtol=0, atol=0, equal_nan=True)


# what torch's compiler loads first may be deprecated by torch itself
@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_compiled(open_store: OpenStore) -> None:
    module = StreamedEmbedding(open_store(), torch.bfloat16)

    def step(ids: torch.Tensor) -> torch.Tensor:
        values: torch.Tensor = module(ids % ROWS)
        return values.float() * 2

    compiled = torch.compile(step, fullgraph=True)
    for tokens in (1, 4, 9):
        ids = torch.randint(10**6, (tokens, HEADS), device=CUDA)
        assert same(compiled(ids), step(ids))


def test_the_module_in_a_graph(open_store: OpenStore) -> None:
    store = open_store()
    module = StreamedEmbedding(store, torch.bfloat16)
    module.lookup.warm_up(torch.device(CUDA), [torch.bfloat16])
    ids = torch.randint(ROWS, (2, 3, HEADS), device=CUDA)
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = module(ids)
    for _ in range(5):
        ids.copy_(torch.randint(ROWS, (2, 3, HEADS)))
        graph.replay()
        torch.cuda.synchronize()
        assert same(out, module(ids.cpu()))
    assert module.lookup.stats()["cuda:0"]["rings"] >= 5
