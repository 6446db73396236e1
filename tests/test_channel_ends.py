"""Channels whose loop is closed or forgotten, whose process ends or forks: nobody waits."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from children import unmeasured
from loops import HEADS, ROW_BYTES, OpenLoop, some_ids, stream_of
from raw_tables import RawTable
from rowstream import _core
from rowstream.errors import UnavailableError
from streams import CLOSED


def test_closed_every_wait_passes(
    raw: RawTable, arena: _core.Arena, open_loop: OpenLoop, rng: np.random.Generator
) -> None:
    loop = open_loop()
    stream = stream_of(loop, arena)
    assert stream.step(some_ids(raw, rng, 1)) is not None
    assert loop.close()
    for _ in range(5):
        began = time.perf_counter()
        assert stream.step(some_ids(raw, rng, 1)) is None
        assert time.perf_counter() - began < 30  # and not by the watchdog, after a minute
        assert stream.last_fault == CLOSED
    with pytest.raises(ValueError, match="table is closed"):
        loop.add(arena, 16, ROW_BYTES)


def test_closed_in_mid_read(
    raw: RawTable, arena: _core.Arena, open_loop: OpenLoop, rng: np.random.Generator
) -> None:
    loop = open_loop(faults=[_core.Fault(0, 1, delay_ms=4000)])
    stream = stream_of(loop, arena)
    stream.post(some_ids(raw, rng, 1))
    time.sleep(0.05)  # right as well where the read has not begun
    closing = threading.Thread(target=loop.close)
    closing.start()
    stream.wait()
    assert stream.take(HEADS) is None  # nobody waited for the read
    closing.join(30)
    assert not closing.is_alive()


def test_a_forgotten_loop_leaves_nobody_waiting(
    raw: RawTable, arena: _core.Arena, rng: np.random.Generator
) -> None:
    loop = _core.Loop(raw.open("uring-direct"), [8, 8], read_timeout_s=0.5)
    stream = stream_of(loop, arena)
    del loop
    gc.collect()
    assert stream.step(some_ids(raw, rng, 1)) is None


AT_EXIT = """
import sys, threading
import numpy as np
sys.path.insert(0, {tests!r})
from rowstream import _core
from streams import Stream
table = _core.DiskTable([{path!r}], [(160, [(0, 0, 0, 64)])], read_timeout_s=1.0,
                         faults=[_core.Fault(0, 1, delay_ms=600_000)])
loop = _core.Loop(table, [16], read_timeout_s=1.0)
stream = Stream(loop.add(_core.Arena(1 << 16), 16, 160))
stream.post(np.arange(16).reshape(1, 16))
{end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("raise ValueError('in the middle')", 1),
        ("stream.wait(); assert stream.take(16) is None", 0),
        (
            "import os\npid = os.fork()\nif pid == 0:\n    os._exit(7)\n"
            "sys.exit(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))",
            7,
        ),
    ],
)
def test_a_process_ends_while_a_read_does_not(end: str, code: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.bin"
    path.write_bytes(bytes(64 * 160))
    script = AT_EXIT.format(tests=str(Path(__file__).parent), path=str(path), end=end)
    # the time-out ends what waits for the read
    done = subprocess.run(
        [sys.executable, "-c", script],
        timeout=120,
        env=unmeasured(),
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr


def test_after_a_fork(raw: RawTable, arena: _core.Arena, open_loop: OpenLoop) -> None:
    loop = open_loop()
    import os

    pid = os.fork()
    if pid == 0:
        try:
            loop.add(arena, HEADS, ROW_BYTES)
        except UnavailableError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
