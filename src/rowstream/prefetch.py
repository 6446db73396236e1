"""Rows read before they are asked for: the ticket of one prefetch. The reading is the core's."""

from __future__ import annotations

from types import TracebackType
from typing import NamedTuple, Protocol

__all__ = ["Progress", "Ticket"]


class Progress(NamedTuple):
    """How far a prefetch has come."""

    wanted_rows: int
    arrived_rows: int  # in memory, or taken by a gather already
    over: bool  # nothing more will be read for it


class _Reads(Protocol):
    def ticket(self, number: int, /) -> tuple[int, int, bool]: ...

    def drop(self, number: int, /) -> None: ...


class Ticket:
    """A prefetch that is under way; gathers find its rows by themselves.

    Drop it when the request is gone: what was not read is forgotten, what was read and not used is
    freed. A ticket that is collected, or leaves its `with` block, is dropped. What nobody takes is
    freed after ten seconds in any case.
    """

    def __init__(self, native: _Reads | None, number: int) -> None:
        self._native = native
        self._number = number

    def progress(self) -> Progress:
        """Return how many rows were asked for and how many have arrived."""
        if self._native is None:
            return Progress(0, 0, True)
        return Progress(*self._native.ticket(self._number))

    def drop(self) -> None:
        """Forget what was asked for; of a dropped ticket nothing is wanted."""
        native, self._native = self._native, None
        if native is not None:
            native.drop(self._number)

    def __enter__(self) -> Ticket:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.drop()

    def __del__(self) -> None:
        self.drop()
