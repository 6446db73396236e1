"""What the README says of GPUs runs: its Python block, against a small checkpoint."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_block_of_the_readme(synth_checkpoint: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    (block,) = [block for block in blocks if "cuda" in block]
    code = re.sub(r'"/models/[^"]*"', repr(str(synth_checkpoint)), block)
    assert str(synth_checkpoint) in code
    names: dict[str, Any] = {}
    exec(compile(code, str(README), "exec"), names)
    lookup, ids, values = names["lookup"], names["ids"], names["values"]
    try:
        assert (names["hidden"] == 0.5).all()
        for first in (0, 5, 1000):
            ids.copy_(torch.arange(first, first + lookup.store.heads).reshape(1, -1))
            names["graph"].replay()
            torch.cuda.synchronize()
            lookup.check()
            expected = torch.empty(values.shape, dtype=values.dtype)
            lookup(ids.cpu(), expected)
            assert torch.equal(values.cpu(), expected)
    finally:
        lookup.close()
        lookup.store.close()
