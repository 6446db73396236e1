"""What commands, synth, verify and the terminal client have to say."""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import resource
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from checkpoints import write_tiny
from provocations import Provoke, met
from provoked_reads import limit
from rowstream import ManifestError, UnavailableError, cli, tables
from rowstream.serve.client import AnswerError, ChatClient
from rowstream.synth import Recipe, write_checkpoint
from rowstream.verify import verify
from rowstream.verify.checksums import read_file, write_file
from rowstream.verify.rows import recipe_of


def command(*arguments: str) -> Provoke:
    """A command on a tiny checkpoint; `{}` stands for its folder."""

    def provoke(folder: Path) -> object:
        write_tiny(folder)
        given = [argument.replace("{}", os.fspath(folder)) for argument in arguments]
        with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
            args = cli._parser().parse_args(given)
            return args.run(args)

    return provoke


ARGUMENT = "argument <option>: needs"
met(
    f"{ARGUMENT} a whole number from 1 on, got <text>",
    argparse.ArgumentError,
    command("bench", "reader", "{}", "--rows", "0"),
    command("bench", "reader", "{}", "--rows", "x"),
)
met(
    f"{ARGUMENT} integers like 1,2,3, got <text>",
    argparse.ArgumentError,
    command("gather", "{}", "--rows", "1,x"),
)
met(
    f"{ARGUMENT} integers of 64 bits, got <n>",
    argparse.ArgumentError,
    command("gather", "{}", "--rows", str(2**64)),
)
met(
    f"{ARGUMENT} seconds from 0.001 to 86400, got <text>",
    argparse.ArgumentError,
    command("serve", "{}", "--read-timeout", "0"),
)
met(
    f"{ARGUMENT} a size such as 64MiB, got <text>",
    argparse.ArgumentError,
    command("serve", "{}", "--table-cache", "64 apples"),
    command("serve", "{}", "--table-cache", "-1"),
)
met(
    f"{ARGUMENT} a port in [0, 65535], got <text>",
    argparse.ArgumentError,
    command("serve", "{}", "--port", "x"),
)
met(
    f"{ARGUMENT} a whole number from 0 on, got <text>",
    argparse.ArgumentError,
    command("verify", "{}", "--seed", "-1"),
)
met(
    "--rows: needs <n> different rows, <table> has <n>",
    ValueError,
    command("bench", "reader", "{}", "--rows", "65"),
)
met(
    "<table>: row id <id> at position <n> is outside [0, <rows>)",
    ValueError,
    command("gather", "{}", "--rows", "64"),
)


def without(module: str) -> Provoke:
    def provoke(folder: Path) -> object:
        def fails(*args: object, **options: object) -> None:
            raise ModuleNotFoundError(f"No module named '{module}'")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("rowstream.serve.server.serve", fails)
            return command("serve", "{}")(folder)

    return provoke


met(
    "serve: <reason>; install with: pip install 'rowstream[serve]'",
    UnavailableError,
    without("accelerate"),
)
met("--device <device>: <reason>", UnavailableError, command("serve", "{}", "--device", "abacus"))


# synth


def synth(**options: Any) -> Provoke:
    return lambda folder: write_checkpoint(folder, **{"base": 100, **options})


def twice(folder: Path) -> object:
    (folder / "file").touch()
    return write_checkpoint(folder, base=100)


def too_long(folder: Path) -> object:
    with limit(resource.RLIMIT_FSIZE, 1 << 20):
        return write_checkpoint(folder, base=2000)


def recipe(act: Callable[[Recipe], object]) -> Provoke:
    def provoke(folder: Path) -> object:
        write_checkpoint(folder, base=100, sparse=True)
        return act(Recipe.read(folder))

    return provoke


met("<folder>: not empty, a checkpoint needs a new or empty folder", FileExistsError, twice)
met("<folder>: needs <n> bytes, <n> free", OSError, synth(base=None, table_gib=200_000))
met("<path>: <reason>", OSError, too_long)
met("base needs 2 or more, got <n>", ValueError, synth(base=1))
met("table_gib needs <low> to <high>, got <n>", ValueError, synth(base=None, table_gib=0))
met("layout needs one of qwen, radixark, got <layout>", ValueError, synth(layout="x"))
met("dtype needs one of fp8, bf16, got <dtype>", ValueError, synth(dtype="x"))
met("seed needs 0 to 2**64 - 1, got <n>", ValueError, synth(seed=-1))
met("row_ids need integers, got <dtype>", TypeError, recipe(lambda made: made.rows([0.5])))
met("row_ids need 0 or more, got <n>", ValueError, recipe(lambda made: made.rows([-1])))


# verify


def verified(**options: Any) -> Provoke:
    def provoke(folder: Path) -> object:
        write_tiny(folder)
        return verify(folder, **options)

    return provoke


def recipe_beside(**changes: Any) -> Provoke:
    """A checkpoint with a recipe that is not its own."""

    def provoke(folder: Path) -> object:
        made = folder / "made"
        write_checkpoint(made, base=100, sparse=True)
        stored = json.loads((made / "synth.json").read_text())
        (made / "synth.json").write_text(json.dumps({**stored, **changes}))
        return recipe_of(tables(made)[0])

    return provoke


def checksums(document: Any) -> Provoke:
    def provoke(folder: Path) -> object:
        path = folder / "sums.json"
        path.write_text(json.dumps(document) if not isinstance(document, str) else document)
        return read_file(path)

    return provoke


def too_much(folder: Path) -> object:
    path = folder / "sums.json"
    with path.open("wb") as file:
        file.truncate(100_000_001)
    return read_file(path)


def other_generator(folder: Path) -> object:
    (folder / "synth.json").write_text("{}")
    return Recipe.read(folder)


shard = {"rows": 1, "sha256": "0"}
stored = {"rows": 2, "row_bytes": 6, "sha256": "0", "shards": [shard]}
met("table needs one of <names>, got <name>", ValueError, verified(table="x"))
met("synth.json: generator needs <name>, got <name>", ValueError, other_generator)
met(
    "synth.json needs the recipe of a table, found <reason>",
    ManifestError,
    recipe_beside(generator="x"),
)
met(
    "synth.json: rows and row bytes needs <n>, found <n>",
    ManifestError,
    recipe_beside(num_rows=8),
)
met(
    "<file> needs checksums as verify writes them, found something else",
    ManifestError,
    checksums({"rowstream_checksums": 99}),
    checksums({"rowstream_checksums": 1, "tables": {"t": stored}}),
    too_much,
)
met(
    "<path>: <reason>", FileNotFoundError, lambda folder: write_file(folder / "absent" / "sums", {})
)


# the client


@contextlib.contextmanager
def answering(*answers: bytes) -> Iterator[str]:
    """A server that gives each connection one of the answers and hangs up."""

    def serve() -> None:
        for answer in answers:
            with listener.accept()[0] as peer:
                while b"\r\n\r\n" not in peer.recv(1 << 16):
                    pass
                peer.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        thread.join()


def asked(answer: bytes, *, chat: bool = True) -> Provoke:
    def provoke(folder: Path) -> object:
        with answering(answer) as url:
            client = ChatClient(url)
            return list(client.chat("m", [])) if chat else client.models()

    return provoke


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def nobody(folder: Path) -> object:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return ChatClient(f"http://127.0.0.1:{free.getsockname()[1]}/v1").models()


def falls_silent(folder: Path) -> object:
    def serve() -> None:
        with listener.accept()[0] as peer:
            peer.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n")
            over.wait()

    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            return list(ChatClient(url, timeout_s=0.1).chat("m", []))
        finally:
            over.set()
            thread.join()


def nothing_served(folder: Path) -> object:
    with answering(ok(b'{"data": []}')) as url:
        return command("chat", "--url", url)(folder)


met("url: needs http://host:port/v1, got <url>", ValueError, lambda folder: ChatClient("host"))
met("<url>: <reason>", UnavailableError, nobody)
met("<url>: <reason>", AnswerError, asked(b""))
met("<url>: no model is served", UnavailableError, nothing_served)
met("<url>: /models is not a list of models", AnswerError, asked(ok(b"{}"), chat=False))
met("<url>: the answer broke off", AnswerError, asked(ok(b"")))
met(
    "<url>: the answer broke off: <reason>",
    AnswerError,
    falls_silent,
)
met(
    "<url>: HTTP status <n>",
    AnswerError,
    asked(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"),
)
met("<url>: an event is not one of a chat", AnswerError, asked(ok(b"data: {}\n\n")))
met(
    "<what the server says>",
    AnswerError,
    asked(ok(b'data: {"error": {"message": "the server: is tired"}}\n\n')),
)
