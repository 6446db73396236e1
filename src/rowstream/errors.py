"""The exceptions that rowstream raises on purpose. Wrong arguments stay built-in errors.

Every class also derives from the built-in that a caller would catch without knowing rowstream, and
survives pickling.
"""

from __future__ import annotations

import os
import reprlib

__all__ = ["ManifestError", "ReadError", "RowstreamError", "UnavailableError", "shown"]

_SHOWN_CHARACTERS = 160

# reprlib, not repr: a value nested almost to the recursion limit parses, and then overflows in repr
_repr = reprlib.Repr()
_repr.maxlevel = 3
_repr.maxlist = _repr.maxtuple = _repr.maxdict = 8
_repr.maxlong = 40
_repr.maxstring = _repr.maxother = _SHOWN_CHARACTERS


def shown(value: object) -> str:
    """Render a value from a file for a message: one line, printable ASCII, bounded length."""
    if isinstance(value, str):
        text = value[: _SHOWN_CHARACTERS + 1].encode("unicode_escape").decode("ascii") or "''"
    else:
        text = _repr.repr(value).encode("ascii", "backslashreplace").decode("ascii")
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."


class RowstreamError(Exception):
    """Anything that rowstream raises on purpose."""


class ManifestError(RowstreamError, ValueError):
    """The checkpoint does not describe a table that can be read."""

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        tensor: str | None = None,
        needed: object = None,
        found: object = None,
    ) -> None:
        super().__init__(message)
        self.file = file
        self.tensor = tensor
        self.needed = needed
        self.found = found

    @classmethod
    def mismatch(
        cls,
        what: str,
        needed: object,
        found: object,
        *,
        file: str | None = None,
        tensor: str | None = None,
    ) -> ManifestError:
        """Build the error whose message reads `file: tensor what needs this, found that`."""
        subject = " ".join(part for part in (shown(tensor) if tensor else "", what) if part)
        if file is not None:
            subject = f"{shown(file)}: {subject}" if subject else shown(file)
        message = f"{subject} needs {shown(needed)}, found {shown(found)}"
        return cls(message, file=file, tensor=tensor, needed=needed, found=found)


class ReadError(RowstreamError, OSError):
    """A read of table bytes failed or came short; `needed` and `got` are bytes at `offset`."""

    def __init__(
        self,
        errno: int,
        strerror: str,
        filename: str | os.PathLike[str] | None = None,
        *,
        offset: int | None = None,
        needed: int | None = None,
        got: int | None = None,
    ) -> None:
        if filename is None:
            super().__init__(errno, strerror)
        else:
            super().__init__(errno, strerror, os.fspath(filename))
        self.offset = offset
        self.needed = needed
        self.got = got

    def __str__(self) -> str:
        reason = f"{self.strerror} (errno {self.errno})"
        if self.needed is None:
            detail = reason if self.offset is None else f"read at {self.offset} failed: {reason}"
        else:
            place = "" if self.offset is None else f" at {self.offset}"
            got = "" if self.got is None else f", got {self.got}"
            detail = f"needs {self.needed} bytes{place}{got}: {reason}"
        return detail if self.filename is None else f"{self.filename}: {detail}"


class UnavailableError(RowstreamError, RuntimeError):
    """What was asked for cannot run here; `probe` is what failed, `auto` what would be chosen."""

    def __init__(self, message: str, *, probe: str | None = None, auto: str | None = None) -> None:
        super().__init__(message)
        self.probe = probe
        self.auto = auto
