"""`StreamedEmbedding` by itself: shapes, dtypes, moves, copies and the life of what it returns."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers.models.qwen4_exp")

from rowstream import RowStore  # noqa: E402
from rowstream.device.embedding import StreamedEmbedding  # noqa: E402
from tiny_models import SCALE, checkpoint, resident  # noqa: E402

IDS = torch.arange(160).reshape(2, 5, 16) * 31


@pytest.fixture
def streamed() -> Iterator[StreamedEmbedding]:
    with RowStore.open(checkpoint("fp8")) as store:
        yield StreamedEmbedding(store, torch.float32)


def table() -> Any:
    """Return the FP8 checkpoint's values, from the BF16 one it was made of."""
    model = resident(checkpoint("bf16"), torch.float32)
    weight = model.model.layers[1].ple.ple_embedding.ngram_embedding.weight.detach()
    scale = torch.tensor(SCALE, dtype=torch.bfloat16).float()
    return (weight / SCALE).to(torch.float8_e4m3fn).float() * scale


def test_values_and_shapes(streamed: StreamedEmbedding) -> None:
    expected = table()
    assert streamed.weight.shape == expected.shape
    assert streamed.weight.is_meta
    assert (streamed.num_embeddings, streamed.embedding_dim) == expected.shape
    last = torch.tensor([0, streamed.num_embeddings - 1])
    for ids in (IDS, IDS[0, 0], IDS.transpose(0, 1), IDS.to(torch.int32), IDS[:0], last):
        assert torch.equal(streamed(ids), expected[ids])
    for outside in (streamed.num_embeddings, -2):
        with pytest.raises(IndexError):
            streamed(torch.full((1, 16), outside))


def test_values_stay_when_the_next_ones_are_read() -> None:
    # BF16 to BF16 needs no cast, so that the values are the very bytes that were read
    with RowStore.open(checkpoint("bf16")) as store:
        streamed = StreamedEmbedding(store, torch.bfloat16)
        first = streamed(IDS)
        kept = first.clone()
        for start in range(1000, 9000, 1000):
            assert not torch.equal(streamed(IDS + start), kept)
        assert torch.equal(first, kept)
    assert torch.equal(first, kept)


def test_dtype_follows_the_module(streamed: StreamedEmbedding) -> None:
    values = streamed(IDS)
    model: Any = torch.nn.Sequential(streamed)
    for move, dtype in (
        (model.half, torch.float16),
        (lambda: model.to(torch.bfloat16), torch.bfloat16),
        (lambda: model.to("cpu"), torch.bfloat16),
        (model.float, torch.float32),
    ):
        assert move()[0] is streamed
        assert streamed(IDS).dtype == streamed.dtype == streamed.weight.dtype == dtype
    # the scale was BF16 in the checkpoint and the codes fit all of these: nothing got lost
    assert torch.equal(streamed(IDS), values)


def test_default_dtype_is_torchs() -> None:
    with RowStore.open(checkpoint("fp8")) as store, torch.device("meta"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            streamed = StreamedEmbedding(store)
        finally:
            torch.set_default_dtype(torch.float32)
        assert streamed.dtype == torch.bfloat16
        assert streamed(IDS).device.type == "cpu"


def test_to_empty_keeps_the_scale(streamed: StreamedEmbedding) -> None:
    values = streamed(IDS)
    streamed.to_empty(device="cpu").to("meta")
    assert torch.equal(streamed(IDS), values)


def test_has_nothing_to_save(streamed: StreamedEmbedding) -> None:
    assert not streamed.state_dict()
    assert not [*streamed.parameters(), *streamed.buffers()]


def test_copy_shares_the_store_only(streamed: StreamedEmbedding) -> None:
    twin = copy.deepcopy(torch.nn.Sequential(streamed))[0].half()
    assert twin is not streamed
    assert twin.store is streamed.store
    assert streamed.dtype == torch.float32
    assert torch.equal(twin(IDS).float(), streamed.half()(IDS).float())


def test_compiled_code_leaves_it_to_python(streamed: StreamedEmbedding) -> None:
    def double(ids: Any) -> Any:
        return streamed(ids) * 2

    assert torch.equal(torch.compile(double, backend="eager")(IDS), double(IDS))
