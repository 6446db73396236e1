"""Options that only a model on a GPU has: what they make there, and why a CPU refuses them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

import torch

from rowstream.device.lookup import LookupOptions
from rowstream.engines import transformers as models
from rowstream.errors import UnavailableError


class LayerOn:
    """A decoder layer that says that it is on a device."""

    def __init__(self, layer: Any, device: torch.device) -> None:
        self.modules = layer.modules
        self._device = device

    def parameters(self) -> Any:
        yield SimpleNamespace(device=self._device)


@pytest.mark.parametrize("device", [torch.device("cuda", 1), torch.device("cpu")])
def test_warming_up_makes_the_ways_of_a_layers_gpu_in_the_models_type(
    synth_model: Any, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    (module,) = models._streamed(synth_model)
    warmed: list[tuple[Any, Any]] = []
    monkeypatch.setattr(module.lookup, "warm_up", lambda *args: warmed.append(args))
    # the model's own device is that of its first weights, whatever layers there are elsewhere
    plain, streamed = (LayerOn(synth_model.model.layers[n], device) for n in (0, 1))
    fake = SimpleNamespace(
        device=torch.device("cuda", 0),
        modules=synth_model.modules,
        model=SimpleNamespace(layers=[plain, streamed]),
    )
    models.warm_up(fake)
    assert warmed == ([(device, [module.dtype])] if device.type == "cuda" else [])


@pytest.mark.parametrize(
    ("options", "wish"),
    [
        ({"table_backend": "device"}, "table_backend device"),
        ({"table_backend": "file", "device": "cpu"}, "table_backend file"),
        ({"lookup": LookupOptions(place="device")}, "place device"),
        ({"lookup": LookupOptions(sync="kernel")}, "sync kernel"),
    ],
)
def test_what_only_a_gpu_has_is_refused_on_a_cpu(
    synth_checkpoint: Any, options: dict[str, Any], wish: str
) -> None:
    with pytest.raises(UnavailableError) as failure:
        models.load_model(synth_checkpoint, **options)
    assert str(failure.value) == f"{wish} needs a model on a GPU (device cuda), its device is cpu"


@pytest.mark.parametrize("options", [{"device": "cuda:1"}, {"device": 0}, {"device_map": "auto"}])
def test_without_cuda_the_reason_is_the_drivers(
    synth_checkpoint: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rowstream.device.driver.available", lambda: (False, "torch sees no GPU"))
    with pytest.raises(UnavailableError, match="table_backend file needs a GPU: torch sees"):
        models.load_model(synth_checkpoint, table_backend="file", **options)


def test_nothing_is_read_ahead_for_a_table_that_the_gpu_has(
    synth_checkpoint: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rowstream.device.driver.available", lambda: (True, "a GPU"))
    for backend, hooks in [("disk", 1), ("device", 0), ("file", 0)]:
        # a device map is taken at its word
        model = models.load_model(synth_checkpoint, table_backend=backend, device_map={"": "cpu"})
        assert len(model.model._forward_pre_hooks) == hooks
        (table,) = models.model_tables(model)
        with table.prefetch([(None, list(range(100)))]) as ticket:
            assert (ticket.progress().wanted_rows > 0) == bool(hooks)
        assert models.stores(model)[0].backend == {"file": "mmap"}.get(backend, "disk")
        models.close(model)


@pytest.mark.parametrize(("host_s", "gpu_s"), [(10.0, 2.0), (0.5, 0.5)])
def test_serve_says_how_a_gpu_waits(
    synth_checkpoint: Any, monkeypatch: pytest.MonkeyPatch, host_s: float, gpu_s: float
) -> None:
    from rowstream.serve.server import serve

    given: dict[str, Any] = {}

    def load_model(path: str, **options: Any) -> Any:
        given.update(options)
        raise UnavailableError("enough seen")

    monkeypatch.setattr(models, "load_model", load_model)
    with pytest.raises(UnavailableError, match="enough seen"):
        serve(
            str(synth_checkpoint),
            port=0,
            table_backend="file",
            sync="hostnode",
            read_timeout_s=host_s,
        )
    assert given["table_backend"] == "file"
    assert given["lookup"] == LookupOptions(sync="hostnode", read_timeout_s=gpu_s)
    assert given["read_timeout_s"] == host_s
