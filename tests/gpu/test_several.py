"""Several tables and several lookups in one graph; several GPUs in one process, and a rank each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from children import unmeasured
from gpu.stores import CUDA, HEADS, ROWS, VALUES, OpenStore, same
from gpu.words import new_stream
from rowstream.device.lookup import Lookup, LookupOptions

two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def looked_up(lookup: Lookup, ids: torch.Tensor) -> torch.Tensor:
    """What the CPU gives."""
    out = torch.empty((*ids.shape, VALUES), dtype=torch.bfloat16)
    lookup(ids.cpu(), out)
    return out


@pytest.mark.parametrize("branches", [False, True])
def test_several_tables_in_one_graph(branches: bool, open_store: OpenStore) -> None:
    # two tables, and the first of them twice
    one, other = (Lookup(open_store(name=name)) for name in ("one", "other"))
    lookups = [one, other, one]
    for lookup in (one, other):
        lookup.warm_up(torch.device(CUDA), [torch.bfloat16])
    ids = [torch.randint(ROWS, (place + 1, HEADS), device=CUDA) for place in range(3)]
    outs = [
        torch.zeros((place + 1, HEADS, VALUES), dtype=torch.bfloat16, device=CUDA)
        for place in range(3)
    ]
    sides = [new_stream() for _ in lookups]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        for some in ids:
            some.add_(11).remainder_(ROWS)
        for side, lookup, some, out in zip(sides, lookups, ids, outs, strict=True):
            if not branches:
                lookup(some, out)
                continue
            side.wait_stream(main)
            with torch.cuda.stream(side):
                lookup(some, out)
        if branches:
            for side in sides:
                main.wait_stream(side)
    for queued in (1, 2, 8, 30):
        for _ in range(queued):
            graph.replay()
        torch.cuda.synchronize()
        for lookup, some, out in zip(lookups, ids, outs, strict=True):
            assert same(out, looked_up(lookup, some))
    for lookup in (one, other):
        lookup.check()
    # a ring each, counted a moment after its answer; two more are those of the warm-up
    assert one.stats()["cuda:0"]["rings"] >= 2 * 41
    assert other.stats()["cuda:0"]["rings"] >= 41


@two_gpus
@pytest.mark.parametrize("current", [0, 1])
def test_one_table_on_two_gpus(current: int, open_store: OpenStore) -> None:
    lookup = Lookup(open_store())
    graphs = []
    with torch.cuda.device(current):
        for index in range(2):
            device = torch.device("cuda", index)
            lookup.warm_up(device, [torch.bfloat16])
            ids = torch.randint(ROWS, (3, HEADS), device=device)
            out = torch.zeros((3, HEADS, VALUES), dtype=torch.bfloat16, device=device)
            # eager: the current device is another one half of the time
            lookup(ids, out)
            assert same(out, looked_up(lookup, ids))
            lookup.finish(lookup.start(ids), out)
            assert same(out, looked_up(lookup, ids))
            torch.cuda.synchronize(device)
            graph = torch.cuda.CUDAGraph()
            # torch's own stream for captures is of the device that captured first
            with torch.cuda.device(index), torch.cuda.graph(graph, stream=new_stream()):
                ids.add_(7).remainder_(ROWS)
                lookup(ids, out)
            graphs.append((graph, ids, out))
        for queued in (1, 5, 40):
            for _ in range(queued):
                for graph, ids, _ in graphs:
                    with torch.cuda.device(ids.device):
                        graph.replay()
            for _, ids, out in graphs:
                torch.cuda.synchronize(ids.device)
                assert same(out, looked_up(lookup, ids))
    lookup.check()
    assert set(lookup.stats()) >= {"cuda:0", "cuda:1"}


@two_gpus
def test_a_gpu_that_was_not_warmed_up_refuses_a_capture(open_store: OpenStore) -> None:
    lookup = Lookup(open_store())
    lookup.warm_up(torch.device("cuda", 0), [torch.bfloat16])
    device = torch.device("cuda", 1)
    ids = torch.randint(ROWS, (3, HEADS), device=device)
    out = torch.zeros((3, HEADS, VALUES), dtype=torch.bfloat16, device=device)
    for warm in (False, True):
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        with torch.cuda.device(device), torch.cuda.graph(graph, stream=new_stream()):
            ids.add_(7).remainder_(ROWS)
            if warm:
                lookup(ids, out)
            else:  # the capture goes on
                with pytest.raises(RuntimeError, match=r"needs warm_up\(\) on cuda:1"):
                    lookup(ids, out)
        graph.replay()
        lookup.warm_up(device, [torch.bfloat16])
    torch.cuda.synchronize(device)
    assert same(out, looked_up(lookup, ids))
    lookup.check()


@two_gpus
@pytest.mark.parametrize("sync", ["doorbell", "pinned", "device"])
def test_what_is_made_for_another_gpu_leaves_the_current_one(
    sync: str, open_store: OpenStore
) -> None:
    streamed = sync == "doorbell"
    options = LookupOptions(sync=sync) if streamed else LookupOptions(place=sync)
    torch.cuda.set_device(0)
    lookup = Lookup(open_store(), options)
    path = lookup.path(torch.device("cuda", 1))  # not by a lookup, which restores it by itself
    assert torch.cuda.current_device() == 0
    assert torch.zeros(1, device="cuda").device.index == 0
    path.close()


# A rank on each GPU: each looks up what it owns, in a graph with the all-reduce behind it.
RANK = """
import faulthandler, os, sys
faulthandler.dump_traceback_later(100, exit=True)
from pathlib import Path
import torch
import torch.distributed as dist
sys.path.insert(0, {tests!r})
from gpu.stores import HEADS, ROWS, VALUES, store_at
from rowstream.device.lookup import Lookup
from rowstream.sharding import Shard
rank, by = int(sys.argv[1]), sys.argv[2]
device = torch.device("cuda", rank)
torch.cuda.set_device(device)
dist.init_process_group("nccl", rank=rank, world_size=2, init_method="file://" + {meet!r} + by,
                        device_id=device)
whole = Lookup(store_at(Path({folder!r})))
lookup = Lookup(store_at(Path({folder!r}), shard=Shard(rank, 2, by)))
lookup.warm_up(device, [torch.float32])
ids = torch.arange(4 * HEADS, device=device).view(4, HEADS) * 101 % ROWS
out = torch.empty((4, HEADS, VALUES), device=device)
dist.all_reduce(out)  # NCCL's own start is not captured
torch.cuda.synchronize()
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    ids.add_(13).remainder_(ROWS)
    lookup(ids, out)
    dist.all_reduce(out)
for queued in (1, 4, 16):
    for _ in range(queued):
        graph.replay()
    torch.cuda.synchronize()
    expected = torch.empty((4, HEADS, VALUES))
    whole(ids.cpu(), expected)
    torch.testing.assert_close(out.cpu(), expected, rtol=0, atol=0, equal_nan=True)
lookup.check()
print("reads", lookup.store.stats()["reads"], flush=True)
os._exit(0)  # an orderly end of NCCL is not what this is about
"""


@two_gpus
@pytest.mark.parametrize("by", ["heads", "rows"])
def test_a_rank_on_each_gpu(by: str, tmp_path: Path, open_store: OpenStore) -> None:
    open_store().close()  # the file
    tests = str(Path(__file__).resolve().parents[1])
    script = RANK.format(tests=tests, folder=str(tmp_path), meet=str(tmp_path / "meet"))
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), by],
            env=unmeasured() | {"NCCL_NVLS_ENABLE": "0"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for rank in ranks:
            output, errors = rank.communicate(timeout=110)
            assert rank.returncode == 0, errors[-3000:]
            assert int(output.split()[1]) > 0
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
