"""Messages of docs/troubleshooting.md that only a GPU can show: they come as they are listed."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

import provoked_gpu  # noqa: F401
from provocations import ON_GPU, OnGpu, pattern, raisers, said


@pytest.mark.parametrize("one", ON_GPU, ids=[one.message for one in ON_GPU])
def test_a_message_is_as_listed(one: OnGpu, tmp_path: Path) -> None:
    with pytest.raises(one.kind) as caught:
        one.provoke(tmp_path)
    assert type(caught.value) is one.kind
    assert pattern(one.message).fullmatch(said(caught.value))
    # where the list of raises says that it comes from
    module, function = one.place.split()
    assert (module, function.rpartition(".")[2]) in raisers(caught.value)
