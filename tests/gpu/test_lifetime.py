"""Ends of every kind, each in a process of its own: none may leave a stream waiting, or itself."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from children import unmeasured

READ_TIMEOUT_S = 1.0

# A table whose first reads never end, a captured lookup of it, and one launch that waits.
SCRIPT = """
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

# eager lookups, several behind a kernel that takes its time: more of them than have been answered
EAGER = """
from rowstream.device.channel import Output
ids = torch.randint(rig.rows, (1, 16), device=rig.device)
outs = [torch.empty((1, 16, 160), dtype=torch.uint8, device=rig.device) for _ in range(6)]
torch.cuda.synchronize()
torch.cuda._sleep(400_000_000)
stream = torch.cuda.current_stream().cuda_stream
for out in outs:
    channel = rig.link.borrow(stream)
    channel.post(stream, ids, 1, None)
    channel.wait(stream)
    channel.take(stream, out, 1, Output(0x7F))
    rig.link.give_back(channel, stream)
"""

ENDS = {
    "eager close": (EAGER + "rig.link.close(); torch.cuda.synchronize()", 0),
    "eager collected": (EAGER + "del channel, rig; gc.collect(); torch.cuda.synchronize()", 0),
    "a start without its finish": (
        EAGER + "lost = rig.link.borrow(stream)\nlost.post(stream, ids, 1, None)\n"
        "lost.enqueued.record()\ndel lost\n"
        "rig.link.close(); torch.cuda.synchronize()",
        0,
    ),
    "a finish behind its close": (
        EAGER + "late = rig.link.borrow(stream)\nlate.post(stream, ids, 1, None)\n"
        "late.enqueued.record()\nrig.link.close()\nouts[0].fill_(0xEE)\n"
        "late.wait(stream); late.take(stream, outs[0], 1, Output(0x7F))\n"
        "rig.link.give_back(late, stream)\ndel channel, late, rig\ngc.collect()\n"
        "torch.cuda.synchronize(); assert (outs[0] == 0x7F).all()",
        0,
    ),
    "eager exit": (EAGER, 0),
    "eager sys.exit": (EAGER + "sys.exit(3)", 3),
    "eager fork": (
        EAGER + "pid = os.fork()\n"
        "if pid == 0:\n"
        "    rig.link.close()\n"
        "    os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
        "rig.link.close(); torch.cuda.synchronize()",
        0,
    ),
    "exit": ("", 0),
    "close": ("rig.link.close(); step.replay(); torch.cuda.synchronize()", 0),
    "collected": (
        "counts = step.counts\n"
        "graph, stream = step.graph, step.stream\n"
        "kept = step.kept\n"
        "table = rig.table\n"
        "del rig\n"
        "step.gate = None\n"
        "gc.collect()\n"
        "step.replay()\n"
        "torch.cuda.synchronize()\n"
        "assert counts.tolist() == [0, 2, 0], counts",
        0,
    ),
    "exception": ("raise KeyError('between start and finish')", 1),
    "sys.exit": ("sys.exit(3)", 3),
    "SIGTERM": ("time.sleep(0.2); os.kill(os.getpid(), signal.SIGTERM); time.sleep(9)", -15),
    "fork": (
        "pid = os.fork()\n"
        "if pid == 0:\n"
        "    os._exit(7)\n"
        "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7\n"
        "torch.cuda.synchronize()\n"
        "assert step.right_void_wrong == (0, 1, 0)",
        0,
    ),
    "a thread that synchronizes": (
        "thread = threading.Thread(target=torch.cuda.synchronize)\n"
        "thread.start()\n"
        "thread.join(10)\n"
        "assert not thread.is_alive()",
        0,
    ),
}


@pytest.mark.parametrize("sync", ["doorbell", "kernel", "hostnode"])
@pytest.mark.parametrize("end", ENDS)
def test_it_ends_by_itself(end: str, sync: str, tmp_path: Path) -> None:
    code, expected = ENDS[end]
    script = SCRIPT.format(
        tests=str(Path(__file__).parents[1]),
        folder=str(tmp_path),
        sync=sync,
        timeout=READ_TIMEOUT_S,
        end=code,
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
