"""Measures where a read is hidden behind work beside it: python benchmarks/hidden.py.

Branches of a graph share a few hardware queues (CUDA_DEVICE_MAX_CONNECTIONS): a wait at the head of
one holds up what the driver put behind it. One process for each number of queues; in each, one or
two lookups and zero to six further branches, whose rows come after 150 us, beside 400 us of work.
Again in several processes: which branches share a queue differs between them.
"""

from __future__ import annotations

import csv
import itertools
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.measure import options

_CONNECTIONS = (1, 2, 8, 32)
_WORK_US = 400
_TURNS = 300


def measure(folder: Path) -> None:
    """Print a line for each shape of the graph: lookups, branches, us without, with, without."""
    import numpy as np
    import torch
    from benchmarks.gpu import captured, percentile, replay_in_turn, work_of

    from rowstream import _core
    from rowstream.device.channel import Output
    from rowstream.device.link import DeviceLink

    device = torch.device("cuda", 0)
    path = folder / "hidden.bin"
    path.write_bytes(np.random.default_rng().bytes(4096 * 160))
    # a file in the page cache would answer at once: each read is held back
    table = _core.DiskTable(
        [str(path)], [(160, [(0, 0, 0, 4096)])], faults=[_core.Fault(0, 2**62, delay_ms=0)]
    )
    link = DeviceLink(table, device=device, row_bytes=160, groups=[8, 8], sync="doorbell")
    work = work_of(_WORK_US, device)
    small = work_of(5, device)
    ids = torch.randint(4096, (1, 16), device=device)
    for lookups in (1, 2):
        for branches in (0, 2, 6):
            sides = [torch.cuda.Stream() for _ in range(lookups + branches)]  # type: ignore[no-untyped-call]
            outs = [torch.empty((1, 16, 160), dtype=torch.uint8, device=device) for _ in sides]

            def step(
                streamed: bool, sides: list[torch.cuda.Stream] = sides,
                outs: list[torch.Tensor] = outs, lookups: int = lookups,
            ) -> None:  # fmt: skip
                main = torch.cuda.current_stream()
                ids.add_(97).remainder_(4096)
                for place, side in enumerate(sides):
                    side.wait_stream(main)
                    with torch.cuda.stream(side):
                        if place >= lookups:
                            small()
                        elif streamed:
                            stream = side.cuda_stream
                            channel = link.for_graph(stream, 1)
                            channel.post(stream, ids, 1, None)
                            channel.wait(stream)
                            channel.take(stream, outs[place], 1, Output(0x7F))
                work()
                for side in sides:
                    main.wait_stream(side)

            arms = {
                arm: captured(lambda step=step, arm=arm: step(arm == "with"))  # type: ignore[misc]
                for arm in ("without", "with", "again")
            }
            replay_in_turn(arms, _TURNS)
            times = " ".join(f"{percentile(arms[arm].times_us, 50):.1f}" for arm in arms)
            print(f"line {lookups} {branches} {times}", flush=True)
    os._exit(0)


def main() -> None:
    parser = options(__doc__, rounds=3)
    parser.add_argument("--one", action="store_true", help="measure in this process")
    arguments = parser.parse_args()
    arguments.dir.mkdir(parents=True, exist_ok=True)
    if arguments.one:
        measure(arguments.dir)
        return
    rows = [
        ("round", "connections", "lookups", "branches", "without_us", "with_us", "hidden", "aa")
    ]
    for turn, connections in itertools.product(range(arguments.rounds), _CONNECTIONS):
        command = [sys.executable, __file__, "--one", "--dir", str(arguments.dir)]
        environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": str(connections)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
        for line in done.stdout.splitlines():
            if line.startswith("line "):
                lookups, branches, without, with_, again = line.split()[1:]
                hidden = "yes" if float(with_) - float(without) < 10 else "no"
                aa = f"{float(again) / float(without):.4f}"
                rows.append(
                    (str(turn), str(connections), lookups, branches, without, with_, hidden, aa)
                )
                print(*rows[-1], flush=True)
        if done.returncode != 0:
            print(done.stderr[-500:], flush=True)
    if not arguments.no_results:
        path = arguments.out / f"hidden-{arguments.machine or 'gpu'}.csv"
        with path.open("w", newline="", encoding="utf-8") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
        print(f"written to {path}")


if __name__ == "__main__":
    main()
