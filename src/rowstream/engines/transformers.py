"""transformers' `Qwen4ExpForCausalLM` with its n-gram tables streamed from the checkpoint.

Only the inner embedding is replaced, between the model's construction and the loading of its
weights; hash, token history and caches stay transformers' own, and none of its globals is touched.
"""

from __future__ import annotations

import functools
import os
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any

from rowstream.catalog import tables
from rowstream.checkpoint import locate, read_config
from rowstream.engines.gpu_options import addressed, need_gpu, placed
from rowstream.engines.loadable import loadable
from rowstream.engines.model_tables import ModelTable
from rowstream.errors import ManifestError, UnavailableError, shown
from rowstream.manifest import Manifest
from rowstream.store import RowStore

if TYPE_CHECKING:
    from rowstream.backends import Progress
    from rowstream.device.embedding import StreamedEmbedding
    from rowstream.device.lookup import LookupOptions
    from rowstream.profile import DeviceProfile

_NEEDED = "needs torch and transformers 5.17 or later: pip install 'rowstream[torch]'"
_MODEL_TYPES = ("qwen4_exp", "qwen4_exp_text")
# What transformers derives from the config where a checkpoint does not store it.
_DERIVED = r"\.ple_embedding\.(layer_multipliers|ngram_heads_offsets|ngram_heads_vocab_sizes)$"
# What load_model sets, and what would take the weights from elsewhere than the table.
_OURS = ("config", "local_files_only", "output_loading_info", "state_dict", "gguf_file")
_ELSEWHERE = ("revision", "subfolder", "cache_dir")
# from_pretrained sets the process's default dtype and replaces torch's init functions meanwhile.
_loading = threading.Lock()
_ONE_PROCESS = ("tp_plan", "tp_size", "device_mesh", "distributed_config")


def load_model(
    path: str | os.PathLike[str],
    *,
    table_backend: str = "auto",
    reader: str = "auto",
    read_timeout_s: float = 10.0,
    on_read_error: str = "raise",
    table_paths: Sequence[str | os.PathLike[str]] = (),
    profile: DeviceProfile | None = None,
    cache_bytes: int = 0,
    read_ahead: bool = True,
    progress: Progress | None = None,
    lookup: LookupOptions | None = None,
    dtype: Any = "auto",
    device: Any = None,
    **from_pretrained_kwargs: Any,
) -> Any:
    """Load a qwen4_exp checkpoint as a `Qwen4ExpForCausalLM` that reads its n-gram rows on demand.

    `path` is a folder or the id of a model in the local hub cache; nothing is downloaded. Of a
    multimodal checkpoint the text part is loaded. `table_backend`, `reader`, `read_timeout_s`,
    `on_read_error`, `table_paths`, `profile` and `cache_bytes` are RowStore's, the rest is
    `from_pretrained`'s. A model on a GPU may have two more backends, "device" and "file", and
    `lookup` says how rows get there. `progress` is called with bytes done and bytes in all while
    pinned tables are read. With `read_ahead` a prompt's rows are read while its first layers run.
    With `table_paths` the folder may lack the files that hold nothing but parts of a table. The
    model is in eval mode and has its stores open until it is collected or `close` is called.

    Raises ManifestError for another architecture, for a PLE layer without a table and for a
    checkpoint that lacks other weights; UnavailableError without a transformers that knows
    qwen4_exp, and where the model is not on a GPU that `table_backend` or `lookup` needs.
    """
    _refuse(from_pretrained_kwargs)
    need_gpu(table_backend, lookup, device, from_pretrained_kwargs.get("device_map"))
    folder = locate(path)
    _check_architecture(folder, read_config(folder))
    base = _model_class()
    config = _text_config(folder)
    options: dict[str, Any] = {"dtype": dtype, **from_pretrained_kwargs}
    if device is not None:
        options.setdefault("device_map", {"": device})
    backend, lookup = placed(table_backend, lookup)
    opened = _open_stores(
        folder,
        config,
        table_paths,
        backend=backend,
        reader=reader,
        read_timeout_s=read_timeout_s,
        on_read_error=on_read_error,
        profile=profile,
        cache_bytes=cache_bytes,
        progress=progress,
    )
    try:
        with _loading, loadable(folder) if table_paths else nullcontext(folder) as source:
            model, info = _streamed_class(base, opened, lookup).from_pretrained(
                source, config=config, local_files_only=True, output_loading_info=True, **options
            )
        if info["missing_keys"]:
            missing = sorted(info["missing_keys"])
            raise ManifestError(
                f"{folder}: {missing[0]} and {len(missing) - 1} other weights that the model needs "
                "are not in the checkpoint",
                tensor=missing[0],
            )
    except BaseException:
        for store in opened.values():
            store.close()
        raise
    # The class was needed for the load alone: from here on the model is what every isinstance,
    # every error message and every look at the class of it expects.
    model.__class__ = base
    if model.name_or_path != os.fspath(folder):
        model.name_or_path = model.config.name_or_path = os.fspath(folder)
    for part in model.modules():
        if hasattr(part, "save_pretrained"):
            part.save_pretrained = functools.partial(_refuse_saving, folder)
    if read_ahead and not addressed(lookup):
        # imports torch, as the model itself
        from rowstream.engines.read_ahead import ReadAhead

        model.model.register_forward_pre_hook(ReadAhead(), with_kwargs=True)
    return model.eval()


def stores(model: Any) -> list[RowStore]:
    """Return the open tables of a model loaded by `load_model`, in the order of its layers."""
    return [module.store for module in _streamed(model)]


def model_tables(model: Any) -> list[ModelTable]:
    """Return the tables of a model as an engine takes them, in the order of its layers."""
    return [ModelTable(module.lookup) for module in _streamed(model)]


def warm_up(model: Any) -> None:
    """Make the ways of a model's tables to its GPUs now, not in its first step; on a CPU nothing.

    Tries how the GPU can wait, pins memory, loads kernels, and fills what `table_backend` "device"
    needs. Raises UnavailableError where this GPU cannot.
    """
    for layer in model.model.layers:
        # a device map may have layers on several
        device = next(layer.parameters()).device
        if device.type != "cuda":
            continue
        for module in _streamed(layer):
            module.lookup.warm_up(device, [module.dtype])


def observe(model: Any, observer: Callable[[str, int, float], None]) -> None:
    """Call `observer(table, tokens, seconds)` after each lookup of a model on a CPU, on its thread.

    `seconds` is what the model waited for the rows of all `tokens` together. On a GPU a lookup is a
    part of the stream, nobody sees that wait, and the observer is not called: what there is to see
    the link counts, `rings` and `answer_s` of `ModelTable.stats()`.
    """
    for module in _streamed(model):
        module.observe = functools.partial(observer, module.store.manifest.name)


def check(model: Any) -> None:
    """Raise what made a step of a model on a GPU void since the last check, once.

    ReadError, or IndexError for an id outside a table; of several tables that of the first. Asks
    the device nothing: of a step that has not ended nothing is known.
    """
    failures: list[Exception] = []
    for module in _streamed(model):
        try:
            module.lookup.check()
        except (OSError, IndexError) as failure:
            failures.append(failure)
    if failures:
        raise failures[0]


def close(model: Any) -> None:
    """Close the tables of a model; its copies share them. A later forward raises."""
    with ExitStack() as each:  # also where one of them cannot, as after a kernel that failed
        for module in _streamed(model):
            each.callback(module.store.close)
            each.callback(module.lookup.close)


def _streamed(model: Any) -> list[StreamedEmbedding]:
    from rowstream.device.embedding import StreamedEmbedding

    return [module for module in model.modules() if isinstance(module, StreamedEmbedding)]


def _refuse(options: Mapping[str, Any]) -> None:
    for name in (*_OURS, *_ELSEWHERE):
        if name in options:
            raise TypeError(f"load_model: {name} cannot be given, path says it all")
    for name in _ONE_PROCESS:
        if options.get(name) is not None:
            raise TypeError(f"load_model: {name} is not supported, one process reads the table")
    if options.get("disable_mmap"):
        raise TypeError("load_model: disable_mmap would read the table into memory")


def _refuse_saving(folder: Any, *args: Any, **kwargs: Any) -> None:
    raise UnavailableError(
        f"save_pretrained: the n-gram table stays in {folder}, a saved copy would lack it"
    )


def _check_architecture(folder: Any, config: Mapping[str, Any] | None) -> None:
    if config is None:
        raise ManifestError(f"{folder}: a model needs config.json, the folder has none")
    found = config.get("model_type")
    if found not in _MODEL_TYPES:
        raise ManifestError(
            f"{folder}/config.json: model_type needs qwen4_exp or qwen4_exp_text, "
            f"found {shown(found)}",
            file="config.json",
            needed="qwen4_exp",
            found=found,
        )


def _model_class() -> Any:
    try:
        import_module("torch")
        return import_module("transformers.models.qwen4_exp.modeling_qwen4_exp").Qwen4ExpForCausalLM
    except ImportError as error:
        raise UnavailableError(f"load_model: {_NEEDED} ({error})") from error


def _text_config(folder: Any) -> Any:
    """Return the text part of the config, with what only the whole has."""
    whole = import_module("transformers").AutoConfig.from_pretrained(folder, local_files_only=True)
    text = whole.get_text_config()
    if text is not whole:
        for name in ("quantization_config", "dtype"):
            if getattr(text, name, None) is None and getattr(whole, name, None) is not None:
                setattr(text, name, getattr(whole, name))
    return text


def _open_stores(
    folder: Any,
    config: Any,
    table_paths: Sequence[str | os.PathLike[str]],
    progress: Progress | None = None,
    **options: Any,
) -> dict[int, RowStore]:
    """Open the table of each PLE layer; keys are decoder layers, counted from zero."""
    found: dict[int, Manifest] = {}
    for manifest in tables(folder, table_paths=table_paths):
        if manifest.family != "ple":
            continue
        if manifest.layer in found:
            raise ManifestError(
                f"{folder}: layer {manifest.layer} needs one table, has {manifest.tensor} and "
                f"{found[manifest.layer].tensor}"
            )
        found[manifest.layer] = manifest
    # ids may come twice, and a table opened twice would be closed once
    wanted = sorted({one_based - 1 for one_based in config.ple_layer_ids})
    if not wanted:
        raise ManifestError(
            f"{folder}/config.json: ple_layer_ids names no layer, no table to stream"
        )
    for layer in wanted:
        if layer not in found:
            raise ManifestError(
                f"{folder}: layer {layer} needs an n-gram table, the checkpoint has tables for "
                f"{sorted(found)}"
            )
    opened: dict[int, RowStore] = {}
    total = sum(found[layer].table_bytes for layer in wanted)

    def told(done: int, _: int) -> None:
        if progress is not None:
            progress(sum(store.manifest.table_bytes for store in opened.values()) + done, total)

    try:
        for layer in wanted:
            opened[layer] = RowStore(found[layer], progress=told, **options)
    except BaseException:
        for store in opened.values():
            store.close()
        raise
    return opened


def _streamed_class(base: Any, opened: Mapping[int, RowStore], lookup: LookupOptions | None) -> Any:
    """Make the class that `from_pretrained` builds: `base` with its tables replaced.

    It has the name and module of `base`, because transformers looks both up to choose weight
    conversions, the loss, and attention and experts implementations.
    """

    def __init__(self: Any, config: Any) -> None:
        base.__init__(self, config)
        for layer, store in opened.items():
            _replace(self.model.layers[layer], f"model.layers.{layer}", store, lookup)
            self._keys_to_ignore_on_load_unexpected.add(
                rf"^model\.layers\.{layer}\.ple\.ple_embedding\.ngram_embedding\."
            )
        self._keys_to_ignore_on_load_missing.add(_DERIVED)

    namespace = {"__init__": __init__, "__module__": base.__module__, "__doc__": base.__doc__}
    return types.new_class(base.__name__, (base,), exec_body=lambda ns: ns.update(namespace))


def _replace(layer: Any, name: str, store: RowStore, lookup: LookupOptions | None) -> None:
    from rowstream.device.embedding import StreamedEmbedding

    inner = layer.ple.ple_embedding
    stock = inner.ngram_embedding
    needed = (stock.num_embeddings, stock.embedding_dim, inner.ngram_heads)
    found = (store.num_rows, store.row_values, store.heads)
    if needed != found:
        raise ManifestError(
            f"{store.manifest.tensor}: {name} needs {needed[0]} rows of {needed[1]} values for "
            f"{needed[2]} heads, the table has {found[0]} rows of {found[1]} for {found[2]}",
            tensor=store.manifest.tensor,
            needed=needed,
            found=found,
        )
    inner.ngram_embedding = StreamedEmbedding(store, options=lookup)
