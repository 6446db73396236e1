"""A process of its own that ends while its stream waits: it may leave neither waiting."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from children import unmeasured

READ_TIMEOUT_S = 1.0

# A table whose first reads never end, a captured lookup of it, and one launch that waits.
_SCRIPT = """
import faulthandler, gc, os, signal, sys, threading, time
faulthandler.dump_traceback_later(25, exit=True)
from pathlib import Path
import torch
sys.path.insert(0, {tests!r})
from gpu.steps import Rig
from rowstream import _core
rig = Rig(Path({folder!r}), {sync!r}, faults=[_core.Fault(0, 10**6, delay_ms=60_000)],
          read_timeout_s={timeout})
step = rig.capture(1)
print("ready", flush=True)
began = time.monotonic()
step.replay()
{end}
"""


def assert_ends_by_itself(end: str, expected: int, sync: str, folder: Path) -> None:
    """Run the script with `end` behind it; it must exit with `expected`, in time."""
    script = _SCRIPT.format(
        tests=str(Path(__file__).parents[1]),
        folder=str(folder),
        sync=sync,
        timeout=READ_TIMEOUT_S,
        end=end,
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=unmeasured(),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        began = time.monotonic()
        _, errors = process.communicate(timeout=30)
        took = time.monotonic() - began
    finally:
        process.kill()
    assert process.returncode == expected, errors
    # what the process does after the stream is free, and CUDA's own end, take their time, and
    # other processes may have the GPU meanwhile
    assert took < READ_TIMEOUT_S + 1.0 + 4.0, errors
