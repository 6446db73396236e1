"""How a stream waits for its rows on this machine: the modes, and the choice of one.

The choice is a probe's (probe.py), kept in the cache folder for as long as driver and device are
the same.
"""

from __future__ import annotations

import os
import subprocess
import sys

from rowstream.device import driver
from rowstream.errors import UnavailableError
from rowstream.profile_cache import read_entry, write_entry

__all__ = ["SYNCS", "choose", "probed"]

MODES = ("doorbell", "kernel", "hostnode", "gate")
"""`doorbell`: the stream waits for a word in memory. `kernel`: a kernel of one thread does.
`hostnode`: a host function waits. `gate`: the host fills before the launch."""
SYNCS = ("auto", *MODES)

_PROBE_TIMEOUT_S = 30.0  # for one mode, the start of Python and CUDA included
_OK = "ok"


def choose(wanted: str, device: int) -> tuple[str, str]:
    """The mode for a device, and the reason.

    "auto" is what ROWSTREAM_SYNC says, or the first of MODES that works here. Raises
    UnavailableError where an explicit mode does not.
    """
    reason = "asked for"
    if wanted == "auto" and "ROWSTREAM_SYNC" in os.environ:
        wanted, reason = os.environ["ROWSTREAM_SYNC"], "ROWSTREAM_SYNC"
    if wanted not in SYNCS:
        raise ValueError(f"sync needs one of {', '.join(SYNCS)}, got {wanted!r}")
    if wanted == "gate":
        return wanted, reason  # asks nothing of the device
    here, why = driver.available(device)
    if not here:
        raise UnavailableError(why, probe="CUDA")
    found = probed(device)
    first = next((mode for mode in MODES if found.get(mode) == _OK), "gate")
    if wanted == "auto":
        missed = [f"{mode}: {found[mode]}" for mode in MODES[: MODES.index(first)]]
        return first, "; ".join(["probed", *missed])
    if found[wanted] != _OK:
        raise UnavailableError(
            f"sync {wanted!r} does not work on cuda:{device}: {found[wanted]}; "
            f"auto would choose {first!r}",
            probe=wanted,
            auto=first,
        )
    return wanted, reason


def probed(device: int) -> dict[str, str]:
    """What each mode but gate is on this device: "ok", or why not."""
    key = f"sync {driver.device_uuid(device)} {driver.driver_version()} {_surroundings()}"
    kept = read_entry(key)
    # anyone may have written it
    if kept is not None and set(kept) == set(MODES[:-1]) and set(map(type, kept.values())) == {str}:
        return kept
    found = {mode: _probe(mode, device) for mode in MODES[:-1]}
    write_entry(key, found)
    return found


def _surroundings() -> str:
    """What changes how streams wait, besides driver and device."""
    names = ("CUDA_MPS_PIPE_DIRECTORY", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING")
    return " ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)


def _probe(mode: str, device: int) -> str:
    # In a process of its own: a wait that no store ends cannot be called off, only killed.
    command = [sys.executable, "-m", "rowstream.device.probe", mode, str(device)]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        done = subprocess.run(
            command,
            timeout=_PROBE_TIMEOUT_S,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONPATH": path},
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {_PROBE_TIMEOUT_S:.0f} s"
    lines = done.stdout.strip().splitlines()
    if lines and done.returncode == 0:
        return lines[-1]
    errors = done.stderr.strip().splitlines()
    return f"exit status {done.returncode}: {errors[-1] if errors else 'nothing said'}"
