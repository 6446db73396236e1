"""Ends of every kind while the launch of a graph waits."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu.ends import assert_ends_by_itself

ENDS = {
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
    assert_ends_by_itself(code, expected, sync, tmp_path)
