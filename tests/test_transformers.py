"""The transformers adapter against the resident model: the same logits and text to the bit."""

from __future__ import annotations

import copy
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.qwen4_exp")

from model_runs import (  # noqa: E402
    SCENARIOS,
    Model,
    Scenario,
    cached_decode,
    expected,
    greedy,
    prefill,
)
from rowstream.engines.transformers import close, load_model, stores  # noqa: E402
from rowstream.errors import UnavailableError  # noqa: E402
from rowstream.synth import write_checkpoint  # noqa: E402
from tiny_models import SCALE, checkpoint, resident  # noqa: E402

BACKENDS = [("disk", "uring"), ("disk", "pool"), ("mmap", "auto"), ("pinned", "auto")]
CASES = [
    ("bf16", torch.bfloat16),
    ("fp8", torch.bfloat16),
    ("fp8", torch.float32),
    ("list-eos", torch.bfloat16),
    ("two-layers-fp8", torch.bfloat16),
    ("multimodal-fp8", torch.bfloat16),
]


def answer(model: Model, scenario: Scenario) -> Any:
    """Run a scenario; it counts only if it asked every table of the model."""
    before = [store.stats()["gathers"] for store in stores(model)]
    with torch.no_grad():
        result = scenario(model)
    after = [store.stats()["gathers"] for store in stores(model)]
    assert after
    assert all(b < a for b, a in zip(before, after, strict=True))
    return result


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{str(case[1])[6:]}")
def case(request: pytest.FixtureRequest) -> Iterator[tuple[str, Any, Model]]:
    name, dtype = request.param
    model = load_model(checkpoint(name), dtype=dtype)
    yield name, dtype, model
    close(model)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_equals_resident_model(case: tuple[str, Any, Model], scenario: Scenario) -> None:
    name, dtype, model = case
    assert torch.equal(answer(model, scenario), expected(name, dtype, scenario))


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("bf16", torch.float32),
        ("fp8-f32-scale", torch.bfloat16),
        ("fp8-f32-scale", torch.float32),
        ("fp8-f32-scale", torch.float16),
        ("two-layers", torch.bfloat16),
        ("multimodal", "auto"),
        ("multimodal-fp8-inner", "auto"),
    ],
)
def test_other_checkpoints(name: str, dtype: Any) -> None:
    model = load_model(checkpoint(name), dtype=dtype)
    assert type(model) is transformers.Qwen4ExpForCausalLM
    assert not model.training
    assert model.dtype == (torch.bfloat16 if dtype == "auto" else dtype)
    assert torch.equal(answer(model, prefill), expected(name, dtype, prefill))
    close(model)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_table_that_the_config_does_not_name(dtype: Any) -> None:
    # stock transformers drops the scale of such a checkpoint, so the oracle has the values instead
    oracle = resident(checkpoint("bf16"), dtype)
    inner = oracle.model.layers[1].ple.ple_embedding.ngram_embedding
    source = resident(checkpoint("bf16"), torch.float32).model.layers[1].ple.ple_embedding
    codes = (source.ngram_embedding.weight / SCALE).to(torch.float8_e4m3fn)
    with torch.no_grad():
        scale = torch.tensor(SCALE, dtype=torch.bfloat16).to(dtype)
        inner.weight.copy_(codes.to(dtype) * scale)
        model = load_model(checkpoint("fp8-unnamed"), dtype=dtype)
        for scenario in (prefill, greedy):
            assert torch.equal(answer(model, scenario), scenario(oracle))
    close(model)


@pytest.mark.parametrize(("backend", "reader"), BACKENDS)
@pytest.mark.parametrize("name", ["bf16", "two-layers-fp8"])
def test_backends(name: str, backend: str, reader: str) -> None:
    try:
        model = load_model(
            checkpoint(name), table_backend=backend, reader=reader, dtype=torch.bfloat16
        )
    except UnavailableError as error:
        pytest.skip(str(error))
    for store in stores(model):
        assert store.backend == backend
        assert reader in ("auto", store.stats()["reader"])
    for scenario in (prefill, cached_decode):
        assert torch.equal(answer(model, scenario), expected(name, torch.bfloat16, scenario))
    close(model)


@pytest.mark.parametrize(("layout", "dtype"), [("qwen", "fp8"), ("radixark", "bf16")])
def test_released_layouts(tmp_path: Path, layout: str, dtype: str) -> None:
    write_checkpoint(tmp_path / "model", base=2000, layout=layout, dtype=dtype)
    oracle = resident(tmp_path / "model")
    model = load_model(tmp_path / "model")
    with torch.no_grad():
        for scenario in (prefill, greedy):
            assert torch.equal(answer(model, scenario), scenario(oracle))
    close(model)


def test_stores_are_matched_by_layer() -> None:
    model = load_model(checkpoint("two-layers"))
    assert [store.manifest.layer for store in stores(model)] == [0, 2]
    for store in stores(model):
        inner = model.model.layers[store.manifest.layer].ple.ple_embedding.ngram_embedding
        assert inner.store is store
    close(model)


def test_changing_the_dtype_changes_the_values() -> None:
    for name, dtypes in (
        ("bf16", [torch.float32]),
        # through float16, as the scale of a resident table is rounded on its way
        ("fp8-f32-scale", [torch.float16, torch.float32]),
    ):
        model, oracle = load_model(checkpoint(name)), resident(checkpoint(name))
        for dtype in dtypes:
            with torch.no_grad():
                assert torch.equal(answer(model.to(dtype), prefill), prefill(oracle.to(dtype)))
        close(model)


def test_copies_share_the_table() -> None:
    model = load_model(checkpoint("fp8"), dtype=torch.bfloat16)
    twin = copy.deepcopy(model)
    assert [id(store) for store in stores(twin)] == [id(store) for store in stores(model)]
    with torch.no_grad():
        oracle = prefill(resident(checkpoint("fp8")).float())
    assert torch.equal(answer(twin.float(), prefill), oracle)
    assert torch.equal(answer(model, prefill), expected("fp8", torch.bfloat16, prefill))
    close(model)


def test_loads_from_the_local_hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    repository = tmp_path / "models--tiny--model"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0123abcd")
    shutil.copytree(checkpoint("multimodal-fp8"), repository / "snapshots" / "0123abcd")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    model = load_model("tiny/model", dtype=torch.bfloat16)
    assert torch.equal(answer(model, prefill), expected("multimodal-fp8", torch.bfloat16, prefill))
    close(model)


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"device_map": "auto"}])
def test_device_options(options: dict[str, Any]) -> None:
    pytest.importorskip("accelerate")
    model = load_model(checkpoint("fp8"), dtype=torch.bfloat16, **options)
    assert torch.equal(answer(model, greedy), expected("fp8", torch.bfloat16, greedy))
    close(model)


def test_loads_from_several_threads() -> None:
    dtypes = [torch.bfloat16, torch.float32] * 2
    models: dict[int, Model] = {}

    def load(index: int) -> None:
        models[index] = load_model(checkpoint("fp8"), dtype=dtypes[index])

    threads = [threading.Thread(target=load, args=(index,)) for index in range(len(dtypes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(models) == len(dtypes)
    for index, model in models.items():
        assert torch.equal(answer(model, prefill), expected("fp8", dtypes[index], prefill))
        close(model)
