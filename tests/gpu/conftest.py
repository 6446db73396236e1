"""All of this needs a GPU: skipped with the reason where there is none, ended where it hangs."""

from __future__ import annotations

import faulthandler
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.faulthandler import fault_handler_stderr_fd_key

from rowstream.device.driver import available
from rowstream.store import RowStore

# A stream that waits for ever cannot be interrupted from Python.
LIMIT_S = 120


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    ours = [item for item in items if here in item.path.parents]
    if not ours:
        return
    usable, reason = available()
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if not usable:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _ended_where_it_hangs(request: pytest.FixtureRequest) -> Iterator[None]:
    # the standard error from before pytest captured it: nobody would see the other
    stderr = request.config.stash.get(fault_handler_stderr_fd_key, 2)
    faulthandler.dump_traceback_later(LIMIT_S, exit=True, file=stderr)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture
def open_store(tmp_path: Path) -> Iterator[Callable[..., RowStore]]:
    """Open stores over files of random bytes; the same codec and name twice is the same file."""
    from gpu.stores import store_at

    stores: list[RowStore] = []

    def open_one(*arguments: Any, **named: Any) -> RowStore:
        stores.append(store_at(tmp_path, *arguments, **named))
        return stores[-1]

    yield open_one
    for store in stores:
        store.close()
