"""`rowstream doctor`: prints what the probes found, in words or as JSON."""

from __future__ import annotations

import argparse
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING

from rowstream.cli.arguments import Commands, add_command
from rowstream.cli.text import fields, json_text, size

if TYPE_CHECKING:
    from rowstream.device.gpus import Gpu, Gpus
    from rowstream.doctor import IoUring, Report

__all__ = ["add_to"]

_EXAMPLES = """\
  rowstream doctor
  rowstream doctor demo
  rowstream doctor demo --json
"""


def add_to(commands: Commands) -> None:
    """Add the command."""
    parser = add_command(
        commands,
        "doctor",
        help="say what this machine allows, how fast its disk is, and what auto chooses",
        description="Say what this machine allows, how fast its disk answers random 4 KiB reads "
        "(about two seconds), and what auto chooses and why. Of a GPU, which ways to wait for rows "
        "work: ten seconds for each GPU the first time, then kept. Needs no privilege.",
        examples=_EXAMPLES,
    )
    parser.add_argument(
        "path",
        metavar="PATH",
        nargs="?",
        help="checkpoint, file or folder on the disk in question; a folder without a table gets "
        "a temporary file of 64 MiB (default: the current folder, with such a file)",
    )
    parser.add_argument("--json", action="store_true", help="the findings as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Probe and print."""
    from rowstream.doctor import examine

    report = examine(args.path, told=_tell)
    print(json_text(asdict(report)) if args.json else _text(report))
    return 0


def _tell(line: str) -> None:
    if sys.stderr.isatty():
        print(line, file=sys.stderr)


def _text(report: Report) -> str:
    device = report.device
    pairs = [
        ("machine", report.machine),
        ("memory", _memory_text(report)),
        ("file", report.file + (" (temporary, removed)" if report.temporary else "")),
        (
            "device",
            f"{device.name or 'not visible'}, {device.kind}"
            + (f", {device.model}" if device.model else "")
            + f"; {device.file_system} at {device.mount_point}",
        ),
        ("io_uring", _io_uring_text(report.io_uring)),
        (
            "O_DIRECT",
            f"yes, reads aligned to {report.direct.alignment} bytes"
            if report.direct.allowed
            else f"no: {report.direct.reason}; reads go through the page cache",
        ),
        ("random reads", _measured_text(report)),
        ("best with", _profile_text(report)),
        (
            "auto chooses",
            f"{report.auto.backend} ({report.auto.reason}),"
            f" {size(report.auto.memory_bytes)} of memory",
        ),
        ("GPU", _gpus_text(report.gpus)),
    ]
    pairs += [("warning", warning) for warning in report.gpus.warnings]
    pairs += [("note", note) for note in report.notes]
    pairs.append(("verdict", _verdict_text(report)))
    return fields(pairs, indent=0)


def _memory_text(report: Report) -> str:
    memory = report.memory
    text = f"{size(memory.available_bytes)} available"
    if memory.limit_bytes is not None:
        text += f", this container is limited to {size(memory.limit_bytes)}"
    if not report.tables:
        return text
    room = min(memory.available_bytes, memory.limit_bytes or memory.available_bytes)
    fits = "would fit" if report.table_bytes < room else "would not fit"
    return f"{text}; {', '.join(report.tables)} of {size(report.table_bytes)} {fits}"


def _verdict_text(report: Report) -> str:
    if report.slow is not None:
        return f"slow: {report.slow}\n{report.expect}"
    if report.device.kind == "memory":
        return "the file is in memory already, there is no disk to read"
    if not report.measured or report.from_device is False:
        return "unknown, see the note"
    return "fit for streaming"


def _io_uring_text(found: IoUring) -> str:
    limit = "no limit" if found.locked_memory_bytes is None else size(found.locked_memory_bytes)
    if found.allowed:
        parts = [
            f"{what} {'registered' if done else 'not registered'}"
            for what, done in (
                ("buffers", found.registered_buffers),
                ("files", found.registered_files),
            )
        ]
        text = f"allowed, {', '.join(parts)}"
    else:
        text = f"{found.reason}" + (f" ({found.errno})" if found.errno else "")
    sysctl = "absent" if found.disabled is None else str(found.disabled)
    text += f"\nsysctl kernel.io_uring_disabled {sysctl}, locked memory (ulimit -l) {limit}"
    return text if found.advice is None else f"{text}\n{found.advice}"


def _gpus_text(found: Gpus) -> str:
    if not found.usable:
        return f"none to bring rows to: {found.reason}"
    return "\n".join([found.reason, *map(_gpu_text, found.devices)])


def _gpu_text(gpu: Gpu) -> str:
    node = "no NUMA node stated" if gpu.numa_node is None else f"NUMA node {gpu.numa_node}"
    waits = ", ".join(mode for mode, result in gpu.waits.items() if result == "ok")
    missed = [f"  {mode}: {result}" for mode, result in gpu.waits.items() if result != "ok"]
    chosen = "auto chooses none" if gpu.auto is None else f"auto chooses {gpu.auto}"
    file = "can" if gpu.file else "cannot, it does not use the host's page tables"
    return "\n".join(
        [
            f"cuda:{gpu.index}: {gpu.name}, compute capability {gpu.compute_capability}, {node}",
            f"  waits that work: {waits}; {chosen} ({gpu.auto_reason})",
            *missed,
            f"  reads a mapped checkpoint by itself (backend file): {file}",
        ]
    )


def _profile_text(report: Report) -> str:
    profile = report.profile
    if profile is None:
        return "not measured"
    if profile.reader == "inline":
        return "any queue depth, the calling thread reads by itself"
    block = f", blocks of {profile.block} bytes" if profile.block else ""
    usual = "" if profile.conclusive else " (the usual one, the measurement could not tell)"
    kept = "; kept for this device" if report.kept else ""
    return f"queue depth {profile.queue_depth}{usual}{block}{kept}"


def _measured_text(report: Report) -> str:
    if not report.measured:
        return "not measured"
    lines = [f"{'depth':>5}  {'4 KiB reads/s':>13}  p50 of that many at once"]
    lines += [f"{m.depth:>5}  {m.reads_per_s:>13,.0f}  {m.p50_us:,.0f} us" for m in report.measured]
    return "\n".join(lines)
