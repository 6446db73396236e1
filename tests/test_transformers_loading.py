"""Loading with the transformers adapter: what it reads, holds, closes, reports and refuses."""

from __future__ import annotations

import copy
import gc
import json
import logging
import mmap
import os
import pickle
import shutil
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
pytest.importorskip("transformers.models.qwen4_exp")

from benchmarks.places import cached_pages, forget  # noqa: E402

from model_runs import expected, prefill  # noqa: E402
from rowstream.engines.transformers import close, load_model, stores  # noqa: E402
from rowstream.errors import ManifestError, UnavailableError  # noqa: E402
from tiny_models import checkpoint, edit_config, edit_tensors, resident, table_apart  # noqa: E402

PLE = "model.layers.1.ple.ple_embedding."


def drop_tensors(folder: Path, *parts: str) -> None:
    """Take the tensors whose names hold one of `parts` out of a checkpoint."""

    def drop(tensors: dict[str, Any]) -> None:
        for key in [key for key in tensors if any(part in key for part in parts)]:
            del tensors[key]

    edit_tensors(folder, drop)


@pytest.fixture
def reported() -> Iterator[list[str]]:
    """Collect what transformers logs at warning level."""
    lines: list[str] = []

    class Collect(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Collect(logging.WARNING)
    logger = logging.getLogger("transformers")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose table is 256 MB of holes, in four files that hold nothing else."""
    folder = tmp_path_factory.mktemp("sparse") / "model"
    shutil.copytree(checkpoint("bf16"), folder)
    edit_config(folder, ngram_vocab_size_base=1_000_000, split_ngram_parts=4)
    drop_tensors(folder, PLE)
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(folder)
        inner = transformers.Qwen4ExpForCausalLM(config).model.layers[1].ple.ple_embedding
    rows, values = inner.ngram_embedding.weight.shape
    assert rows % 4 == 0
    index_path = folder / "model.safetensors.index.json"
    index = json.loads(index_path.read_text())
    for shard in range(4):
        name, size = f"table-{shard}.safetensors", rows // 4 * values * 2
        tensor = f"{PLE}ngram_embedding.shard_{shard}.weight"
        entry = {"dtype": "BF16", "shape": [rows // 4, values], "data_offsets": [0, size]}
        header = json.dumps({tensor: entry}).encode()
        with open(folder / name, "wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + size)
        index["weight_map"][tensor] = name
    index_path.write_text(json.dumps(index))
    return folder


def memory_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("backend", ["disk", "mmap"])
def test_neither_reads_nor_allocates_the_table(sparse: Path, backend: str) -> None:
    close(load_model(checkpoint("bf16")))  # imports, threads and allocators come first
    files = sorted(sparse.glob("table-*.safetensors"))
    for path in files:
        forget(path)
    if any(cached_pages(path) for path in files):
        pytest.skip("the page cache of this file system cannot be dropped")
    gc.collect()
    before = memory_bytes()
    model = load_model(sparse, table_backend=backend)
    grown = memory_bytes() - before
    assert stores(model)[0].manifest.table_bytes > 250e6
    assert grown < 100e6  # of which the store's own buffers may take 64 MiB
    # around each header: what readahead brings in with it
    assert all(cached_pages(path) <= 64 for path in files)
    close(model)


def test_model_holds_no_table() -> None:
    model, oracle = load_model(checkpoint("fp8")), resident(checkpoint("fp8"))
    table = {key for key in oracle.state_dict() if ".ngram_embedding." in key}
    assert table
    assert model.state_dict().keys() == oracle.state_dict().keys() - table
    assert all(".ngram_embedding" not in name for name, _ in model.named_parameters())
    close(model)


def test_pickling_and_saving_are_refused(tmp_path: Path) -> None:
    model = load_model(checkpoint("bf16"))
    with pytest.raises(TypeError, match=r"layers\.1\.ple: a streamed table cannot be pickled"):
        pickle.dumps(model)
    for part in (model, copy.deepcopy(model), model.model):
        with pytest.raises(UnavailableError, match="a saved copy would lack it"):
            part.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    close(model)


def open_tables(folder: Path) -> int:
    """Count this process's descriptors and mappings of the table's files under `folder`."""
    names = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
    names += [line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()]
    return sum(name.startswith(f"{folder}/table") for name in names)


@pytest.mark.parametrize("backend", ["disk", "mmap"])
def test_files_are_closed_with_the_model(tmp_path: Path, backend: str) -> None:
    folder = shutil.copytree(checkpoint("two-layers-fp8"), tmp_path / "model").resolve()
    table_apart(folder)
    model = load_model(folder, table_backend=backend)
    prefill(model)
    assert open_tables(folder) > 0
    close(model)
    assert open_tables(folder) == 0
    with pytest.raises(ValueError, match="closed"):
        prefill(model)
    model = load_model(folder, table_backend=backend)
    prefill(model)
    assert open_tables(folder) > 0
    del model
    gc.collect()
    assert open_tables(folder) == 0


def test_missing_weights_are_named(tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("two-layers"), tmp_path / "model").resolve()
    table_apart(folder)
    missing = "model.layers.0.mlp.shared_expert.up_proj.weight"
    drop_tensors(folder, missing)
    with pytest.raises(ManifestError, match=r"shared_expert\.up_proj\.weight") as caught:
        load_model(folder)
    assert caught.value.tensor == missing
    assert open_tables(folder) == 0


def test_layer_without_a_table_is_named(tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("two-layers"), tmp_path / "model")
    drop_tensors(folder, "layers.2.ple.ple_embedding.")
    with pytest.raises(ManifestError, match="layer 2"):
        load_model(folder)


def test_table_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(checkpoint("bf16"), tmp_path / "model")
    edit_config(folder, ngram_vocab_size_base=4000)
    with pytest.raises(ManifestError):
        load_model(folder)


def test_only_the_tables_keys_are_silenced(tmp_path: Path, reported: list[str]) -> None:
    close(load_model(checkpoint("two-layers-fp8")))
    assert not [line for line in reported if "UNEXPECTED" in line or "ngram_embedding" in line]
    folder = shutil.copytree(checkpoint("two-layers-fp8"), tmp_path / "model")
    stray = {"model.layers.0.stray.weight", "model.layers.0.ple.ple_embedding.stray"}
    names = set(stray)

    def add(tensors: dict[str, Any]) -> None:
        tensors.update({names.pop(): torch.zeros(1) for _ in range(len(names))})

    edit_tensors(folder, add)
    close(load_model(folder))
    report = "\n".join(reported)
    assert all(name in report for name in stray)
    assert "ngram_embedding" not in report


def test_hash_buffers_may_be_absent(tmp_path: Path, reported: list[str]) -> None:
    folder = shutil.copytree(checkpoint("fp8"), tmp_path / "model")
    drop_tensors(folder, "layer_multipliers", "ngram_heads_offsets", "ngram_heads_vocab_sizes")
    model = load_model(folder, dtype=torch.bfloat16)
    assert not [line for line in reported if "MISSING" in line]
    with torch.no_grad():
        assert torch.equal(prefill(model), expected("fp8", torch.bfloat16, prefill))
    close(model)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"config\.json"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ManifestError, match=r"model_type needs qwen4_exp .* llama"):
        load_model(tmp_path)


@pytest.mark.parametrize("option", ["config", "output_loading_info", "disable_mmap", "tp_plan"])
def test_options_that_would_break_it_are_refused(option: str) -> None:
    options: dict[str, Any] = {option: True}
    with pytest.raises(TypeError, match=option):
        load_model(checkpoint("bf16"), **options)


@pytest.mark.parametrize("absent", ["torch", "transformers.models.qwen4_exp.modeling_qwen4_exp"])
def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch, absent: str) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(UnavailableError, match=r"pip install 'rowstream\[torch\]'"):
        load_model(checkpoint("bf16"))


def test_one_table_that_cannot_be_closed_does_not_keep_the_others_open(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from types import SimpleNamespace

    from rowstream.engines import transformers as engine

    closed: list[str] = []

    def fails(name: str) -> None:
        closed.append(name)
        raise RuntimeError("cuCtxSynchronize: CUDA_ERROR_LAUNCH_FAILED")

    def table(name: str) -> Any:
        lookup = SimpleNamespace(close=lambda: fails(f"lookup {name}"))
        store = SimpleNamespace(close=lambda: closed.append(f"store {name}"))
        return SimpleNamespace(lookup=lookup, store=store)

    monkeypatch.setattr(engine, "_streamed", lambda model: [table("a"), table("b")])
    with pytest.raises(RuntimeError, match="LAUNCH_FAILED"):
        engine.close(None)
    assert sorted(closed) == ["lookup a", "lookup b", "store a", "store b"]
    # a lookup reads its store
    assert all(closed.index(f"lookup {name}") < closed.index(f"store {name}") for name in "ab")


def test_a_layer_named_twice_has_one_table_and_a_failure_leaves_none_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    import checkpoints
    from rowstream import RowStore
    from rowstream.engines import transformers as engine

    arrays = []
    for layer, rows in checkpoints.TINY_ROWS.items():
        table = checkpoints.table_bytes(rows, checkpoints.TINY_WIDTH)
        arrays += [checkpoints.scale(layer), *checkpoints.shards(table, [rows], layer=layer)]
    checkpoints.write_config(tmp_path, ple_layer_ids=[6, 2, 6])
    checkpoints.write_file(tmp_path / "model.safetensors", arrays)
    made: list[RowStore] = []

    def make(*args: Any, **options: Any) -> RowStore:
        if len(made) == limit:
            raise MemoryError
        made.append(RowStore(*args, **options))
        return made[-1]

    monkeypatch.setattr(engine, "RowStore", make)
    limit, config = 2, SimpleNamespace(ple_layer_ids=[6, 2, 6])
    opened = engine._open_stores(tmp_path, config, ())
    assert sorted(opened) == [1, 5]
    assert list(opened.values()) == made
    made.clear()
    limit = 1
    with pytest.raises(MemoryError):
        engine._open_stores(tmp_path, config, ())
    with pytest.raises(ValueError, match="table is closed"):
        made[0].gather([0])
