"""Ends of every kind while eager lookups wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu.ends import assert_ends_by_itself

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
}


@pytest.mark.parametrize("sync", ["doorbell", "kernel", "hostnode"])
@pytest.mark.parametrize("end", ENDS)
def test_it_ends_by_itself(end: str, sync: str, tmp_path: Path) -> None:
    code, expected = ENDS[end]
    assert_ends_by_itself(code, expected, sync, tmp_path)
