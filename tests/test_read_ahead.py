"""A prompt's rows are read when its forward begins, or when the server admits it."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from rowstream.engines.read_ahead import ReadAhead  # noqa: E402
from rowstream.engines.transformers import close, load_model, stores  # noqa: E402
from rowstream.prefetch import Ticket  # noqa: E402
from rowstream.runtime.engine import Request, SamplingParams  # noqa: E402
from rowstream.runtime.generate import TransformersEngine  # noqa: E402
from rowstream.store import RowStore  # noqa: E402


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not done():
        assert time.monotonic() < end
        time.sleep(0.005)


def gather_once_all_is_there(store: RowStore) -> None:
    """Have a store's gathers wait until what was read ahead before them has arrived.

    Else it is the faster one of two threads that reads a row.
    """
    tickets: list[Ticket] = []
    prefetch, gather = store.prefetch, store.gather

    def noted(runs: Any) -> Ticket:
        tickets.append(prefetch(runs))
        return tickets[-1]

    def late(*args: Any, **kwargs: Any) -> Any:
        for ticket in tickets:
            until(lambda ticket=ticket: ticket.progress().over)  # type: ignore[misc]
        return gather(*args, **kwargs)

    store.prefetch = noted  # type: ignore[method-assign]
    store.gather = late  # type: ignore[method-assign]


def held(go_on: threading.Event) -> None:
    assert go_on.wait(60)


def prompt(length: int) -> Any:
    return torch.randint(0, 1700, (1, length), generator=torch.Generator().manual_seed(3))


def test_a_forward_reads_its_prompt_ahead(synth_checkpoint: Path) -> None:
    ids = prompt(200)
    without = load_model(synth_checkpoint, read_ahead=False)
    model = load_model(synth_checkpoint)
    gather_once_all_is_there(stores(model)[0])
    with torch.no_grad():
        want = without(input_ids=ids, use_cache=False).logits
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, want)
        assert stores(model)[0].stats()["lookahead_reads"] > 0
        assert stores(without)[0].stats()["lookahead_reads"] == 0
        # a short prompt, and one that goes on from a cache, are not worth it
        before = stores(model)[0].stats()["lookahead_reads"]
        first = model(input_ids=ids[:, :20], use_cache=True)
        # transformers renamed the argument between 5.17 and 5.24
        name = "cache" if hasattr(first, "cache") else "past_key_values"
        model(input_ids=ids[:, 20:120], use_cache=True, **{name: getattr(first, name)})
        assert stores(model)[0].stats()["lookahead_reads"] == before
    close(model)
    close(without)


def test_padding_is_read_ahead_as_it_is_hashed(synth_checkpoint: Path) -> None:
    model = load_model(synth_checkpoint)
    store = stores(model)[0]
    ids = prompt(120).repeat(2, 1)
    mask = torch.ones_like(ids)
    mask[1, :40] = 0
    gather_once_all_is_there(store)
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask, use_cache=False)
    stats = store.stats()
    assert stats["ahead_rows"] + stats["duplicate_rows"] == stats["rows"]
    assert stats["reads"] == 0
    close(model)


def test_a_graph_has_no_prompt_yet(synth_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu(torch.Tensor):  # type: ignore[misc,name-defined]
        """A tensor of a GPU, whose values a capture must not ask for."""

        is_cuda = True

        def cpu(self) -> Any:
            raise RuntimeError("operation not permitted when stream is capturing")

    class Cache:
        def get_seq_length(self) -> int:
            raise RuntimeError("operation not permitted when stream is capturing")

    ids = prompt(100).as_subclass(OnGpu)
    capturing = True
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing)
    ahead = ReadAhead()
    before = stores(synth_model)[0].stats()["lookahead_reads"]
    for given in ({"input_ids": ids}, {"input_ids": ids, "past_key_values": Cache()}):
        ahead(synth_model.model, (), given)
    assert stores(synth_model)[0].stats()["lookahead_reads"] == before
    capturing = False
    with pytest.raises(RuntimeError, match="not permitted"):
        ahead(synth_model.model, (), {"input_ids": ids})


def test_the_server_reads_ahead_at_admission(synth_checkpoint: Path, synth_tokenizer: Any) -> None:
    model = load_model(synth_checkpoint, read_ahead=False)
    store = stores(model)[0]
    engine = TransformersEngine(model, synth_tokenizer, name="tiny", tables=[store])
    go_on = threading.Event()
    try:
        long = Request(tuple(prompt(20)[0].tolist()), SamplingParams(max_tokens=40, temperature=0))
        waits = Request(tuple(prompt(300)[0].tolist()), SamplingParams(max_tokens=1, temperature=0))
        # the first answer stands still behind its first token
        forwards = itertools.count()
        hook = model.register_forward_pre_hook(
            lambda *args: held(go_on) if next(forwards) > 0 else None
        )
        (first,) = engine.submit([long])
        (second,) = engine.submit([waits])
        # while the first is answered, the rows of the second are read
        next(first)
        ticket: Any
        (ticket,) = second.read_ahead
        until(lambda: ticket.progress().over)
        assert engine.stats()["waiting"] == 1
        assert store.stats()["lookahead_reads"] > 1000
        go_on.set()
        for generation in (first, second):
            assert list(generation)
        assert store.stats()["ahead_rows"] > 2000
        until(lambda: second.read_ahead == [])
        hook.remove()
    finally:
        go_on.set()
        engine.close()
        close(model)
