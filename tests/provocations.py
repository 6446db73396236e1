"""What brings about each message of docs/troubleshooting.md: the list, and how one is tried.

The functions are in provoked_*.py; each takes an empty folder and raises. Those of provoked_gpu.py
need a GPU, and are tried in tests/gpu.
"""

from __future__ import annotations

import argparse
import functools
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import rowstream
from rowstream import cli

PACKAGE = Path(rowstream.__file__).parent
Provoke = Callable[[Path], object]


@dataclass(frozen=True)
class Provocation:
    """A line of the document, the type of its error, and a way to meet it."""

    message: str
    kind: type[BaseException]
    provoke: Provoke
    number: int  # of the ways to one message

    @property
    def name(self) -> str:
        return f"{self.message} ({self.number})"


PROVOCATIONS: list[Provocation] = []


@dataclass(frozen=True)
class OnGpu:
    """A line of the document that only a GPU can show, where it is raised, and a way to meet it."""

    message: str
    kind: type[BaseException]
    place: str  # module and function
    provoke: Provoke


ON_GPU: list[OnGpu] = []


def met(message: str, kind: type[BaseException], *provoke: Provoke) -> None:
    """Note one or more ways to meet a message."""
    known = sum(one.message == message for one in PROVOCATIONS)
    PROVOCATIONS.extend(
        Provocation(message, kind, each, known + i) for i, each in enumerate(provoke)
    )


def met_on_gpu(message: str, kind: type[BaseException], place: str, provoke: Provoke) -> None:
    """Note the way to a message that needs a GPU."""
    ON_GPU.append(OnGpu(message, kind, place, provoke))


@functools.cache
def raised(one: Provocation) -> BaseException:
    """Provoke an error, once."""
    with tempfile.TemporaryDirectory(prefix="rowstream-provoked-") as folder:
        try:
            one.provoke(Path(folder))
        except (Exception, SystemExit) as error:
            return next((e for e in chain(error) if isinstance(e, argparse.ArgumentError)), error)
    raise AssertionError(f"{one.name}: nothing was raised")


def chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it came of, shown or not."""
    waiting, seen = [error], set()
    while waiting:
        each = waiting.pop()
        if id(each) not in seen:
            seen.add(id(each))
            yield each
            waiting += [cause for cause in (each.__cause__, each.__context__) if cause is not None]


def frames(error: BaseException) -> Iterator[tuple[str, str, int]]:
    """Yield file, function and line of every frame of this package that an error went through."""
    for each in chain(error):
        step = each.__traceback__
        while step is not None:
            code = step.tb_frame.f_code
            file = Path(code.co_filename)
            if file.is_relative_to(PACKAGE):
                yield file.relative_to(PACKAGE).as_posix(), code.co_name, step.tb_lineno
            step = step.tb_next


def places(error: BaseException) -> set[tuple[str, int]]:
    """Return file and line of every frame of this package that an error went through."""
    return {(file, line) for file, _, line in frames(error)}


def raisers(error: BaseException) -> set[tuple[str, str]]:
    """Return file and function of every frame of this package that an error went through."""
    return {(file, function) for file, function, _ in frames(error)}


def said(error: BaseException) -> str:
    """Return an error's text; of the operating system's the line that a command prints."""
    if isinstance(error, OSError):
        return cli._line(error)
    return str(error)


def pattern(message: str) -> re.Pattern[str]:
    """Return what a line of the document stands for: `<...>` is any text."""
    parts = re.split(r"(<[^<>]+>)", message)
    return re.compile("".join(".+" if part[:1] == "<" else re.escape(part) for part in parts))
