"""A whole model on a GPU: the same logits and text from every place that its table can be in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch

from rowstream.device.lookup import LookupOptions
from rowstream.engines.transformers import check, close, load_model
from rowstream.errors import ReadError, UnavailableError

TABLES = ["disk", "mmap", "pinned", "device"]


@contextmanager
def loaded(folder: Path, **options: Any) -> Iterator[Any]:
    model = load_model(folder, device="cuda", **options)
    try:
        yield model
    finally:
        close(model)


def prompt_of(model: Any, tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    vocabulary = int(model.config.vocab_size)
    return torch.randint(20, vocabulary, (2, tokens), generator=generator).to("cuda")


def answers(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of two prompts, and what is generated after them."""
    ids = prompt_of(model, 33)
    with torch.no_grad():
        logits = model(input_ids=ids).logits
        text = model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=12,
            do_sample=False,
            pad_token_id=0,
        )
    check(model)
    return logits.cpu(), text.cpu()


def test_every_place_gives_the_same_model(synth_checkpoint: Path) -> None:
    found = {}
    for table in TABLES:
        with loaded(synth_checkpoint, table_backend=table) as model:
            found[table] = answers(model)
    logits, text = found["device"]
    assert not logits.isnan().any()
    for table in TABLES:
        assert torch.equal(found[table][0], logits), table
        assert torch.equal(found[table][1], text), table


@pytest.mark.parametrize("sync", ["doorbell", "kernel", "hostnode", "gate"])
def test_every_wait_gives_the_same_model(sync: str, synth_checkpoint: Path) -> None:
    with loaded(synth_checkpoint, table_backend="device") as model:
        expected = answers(model)
    options = LookupOptions(sync=sync)
    with loaded(synth_checkpoint, table_backend="disk", lookup=options) as model:
        found = answers(model)
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])


def forward(model: Any) -> None:
    with torch.no_grad():
        model(input_ids=prompt_of(model, 5))
    torch.cuda.synchronize()
    check(model)


def test_a_closed_table_is_noticed(synth_checkpoint: Path) -> None:
    with loaded(synth_checkpoint, table_backend="disk") as model:
        forward(model)
        close(model)
        with pytest.raises((ReadError, ValueError)):
            forward(model)


def test_a_file_backend_is_refused_with_the_reason(synth_checkpoint: Path) -> None:
    from rowstream.device import driver

    if driver.attributes(0).pageable_uses_host_page_tables:
        pytest.skip("this GPU reads the host's mappings")
    with (
        loaded(synth_checkpoint, table_backend="file") as model,
        pytest.raises(UnavailableError, match="page tables"),
    ):
        forward(model)
