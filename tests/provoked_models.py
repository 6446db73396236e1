"""Why a model is not loaded, and why it is not served."""

from __future__ import annotations

import pickle
import shutil
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from checkpoints import write_config, write_tiny
from provocations import Provoke, met
from rowstream import ManifestError, RowStore, UnavailableError
from rowstream.device.embedding import StreamedEmbedding
from rowstream.engines.transformers import close, load_model
from rowstream.serve import serve
from rowstream.serve.server import bind, run
from scripted import ScriptedEngine

# loading


def loaded(**options: Any) -> Provoke:
    return lambda folder: load_model(folder, **options)


def model(act: Callable[[Any, Path], object]) -> Provoke:
    def provoke(folder: Path) -> object:
        from tiny_models import checkpoint

        ready = load_model(checkpoint("bf16"))
        try:
            return act(ready, folder)
        finally:
            close(ready)

    return provoke


def stripped(folder: Path) -> object:
    from tiny_models import checkpoint, edit_tensors

    place = folder / "model"
    shutil.copytree(checkpoint("bf16"), place)

    def drop(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if "layernorm" in name]:
            del tensors[name]

    edit_tensors(place, drop)
    return load_model(place)


def without_transformers(folder: Path) -> object:
    write_tiny(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "transformers.models.qwen4_exp.modeling_qwen4_exp", None)
        return load_model(folder)


def another_architecture(folder: Path) -> object:
    write_tiny(folder)
    write_config(folder, model_type="llama")
    return load_model(folder)


def without_config(folder: Path) -> object:
    write_tiny(folder)
    (folder / "config.json").unlink()
    return load_model(folder)


def pickled(folder: Path) -> object:
    write_tiny(folder)
    with RowStore.open(folder) as store:
        return pickle.dumps(StreamedEmbedding(store))


met(
    "load_model: <argument> cannot be given, path says it all",
    TypeError,
    loaded(revision="main"),
)
met(
    "load_model: <argument> is not supported, one process reads the table",
    TypeError,
    loaded(tp_plan="auto"),
)
met(
    "load_model: disable_mmap would read the table into memory",
    TypeError,
    loaded(disable_mmap=True),
)
met("<folder>: a model needs config.json, the folder has none", ManifestError, without_config)
met(
    "<folder>/config.json: model_type needs qwen4_exp or qwen4_exp_text, found <model type>",
    ManifestError,
    another_architecture,
)
met(
    "<folder>: <tensor> and <n> other weights that the model needs are not in the checkpoint",
    ManifestError,
    stripped,
)
met(
    "load_model: needs torch and transformers 5.17 or later: pip install 'rowstream[torch]' "
    "(<reason>)",
    UnavailableError,
    without_transformers,
)
met(
    "save_pretrained: the n-gram table stays in <folder>, a saved copy would lack it",
    UnavailableError,
    model(lambda ready, folder: ready.save_pretrained(folder)),
)
met(
    "<table>: a streamed table cannot be pickled, its rows are in open files; save the state_dict,"
    " or load the checkpoint again where it is needed",
    TypeError,
    pickled,
)

# starting


def nothing_installed(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("importlib.util.find_spec", lambda name: None)
        serve("anything", port=0)


def taken(folder: Path) -> None:
    with bind("127.0.0.1", 0) as first:
        first.listen()
        bind("127.0.0.1", first.getsockname()[1])


def taken_late(folder: Path) -> None:
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", first.getsockname()[1]) as second:
        first.listen()
        run(ScriptedEngine(), second)


def no_such_host(folder: Path) -> None:
    def fails(*args: object, **options: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "getaddrinfo", fails)
        bind("nowhere", 0)


met(
    "serve: needs <modules>, install with: pip install 'rowstream[serve]'",
    UnavailableError,
    nothing_installed,
)
met("port: must be from 0 to 65535, got <n>", ValueError, lambda folder: bind("127.0.0.1", 99999))
met("<host>:<port>: <reason>", UnavailableError, taken, no_such_host)
met("http://<host>:<port>: <reason>", UnavailableError, taken_late)
