"""Machines that refuse io_uring: tried for real where this machine lets us, skipped with the reason
where not. Rows are right, and `doctor` says what is the matter.
"""

from __future__ import annotations

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from platforms import checkpoint, look, need_root, skip

pytestmark = pytest.mark.platform


@pytest.fixture
def plain() -> Iterator[tuple[Path, Path]]:
    with tempfile.TemporaryDirectory(prefix="rowstream-platform-") as name:
        Path(name).chmod(0o755)
        with checkpoint(Path(name) / "model") as made:
            yield made


def test_nothing_refused(plain: tuple[Path, Path]) -> None:
    found = look("nothing refused", *plain, what="this machine as it is")
    assert found["reader"] in ("uring", "pool")


SETUP, ENTER, REGISTER = 425, 426, 427


@pytest.mark.parametrize(
    ("call", "number", "name"),
    [
        *((SETUP, number, name) for number, name in ((1, "EPERM"), (38, "ENOSYS"), (12, "ENOMEM"))),
        (ENTER, 1, "EPERM"),
    ],
)
def test_a_seccomp_filter_that_refuses_io_uring(
    call: int, number: int, name: str, plain: tuple[Path, Path]
) -> None:
    which = {SETUP: "io_uring_setup", ENTER: "io_uring_enter"}[call]
    case = f"seccomp: {which} gives {name}"
    restrict = f"refuse({call}, {number})"
    found = look(case, *plain, restrict, "a filter as container runtimes install it")
    assert found["reader"] == "pool"
    assert os.strerror(number) in found["reason"]
    assert f"({name})" in found["io_uring"]
    assert os.strerror(number) in found["auto chooses"]


def test_a_seccomp_filter_that_refuses_registering(plain: tuple[Path, Path]) -> None:
    found = look(
        "seccomp: io_uring_register gives ENOMEM",
        *plain,
        f"refuse({REGISTER}, 12)",
        "the ring stays, unregistered",
    )
    assert found["reader"] == "uring"
    assert "buffers not registered (Cannot allocate memory)" in found["reason"]
    assert found["io_uring"].startswith("allowed, buffers not registered, files not registered")


@pytest.mark.parametrize("limit_bytes", [0, 64 << 10])
def test_a_small_limit_of_locked_memory(limit_bytes: int, plain: tuple[Path, Path]) -> None:
    case = f"ulimit -l {limit_bytes >> 10}"
    need_root(case)
    found = look(case, *plain, f"drop_root({limit_bytes})", "an ordinary user")
    if found["reader"] == "pool":  # before Linux 5.12 the ring itself counts
        assert "Cannot allocate memory" in found["reason"]
        return
    assert found["reader"] == "uring"
    assert "buffers not registered (Cannot allocate memory)" in found["reason"]
    assert found["io_uring"].startswith("allowed, buffers not registered")
    assert "ulimit -l unlimited" in found["io_uring"]


def test_an_ordinary_user(plain: tuple[Path, Path]) -> None:
    need_root("an ordinary user")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    look("an ordinary user", *plain, f"drop_root({limit})", "the usual limit of locked memory")


def test_the_sysctl_that_refuses_io_uring(plain: tuple[Path, Path]) -> None:
    case = "sysctl kernel.io_uring_disabled=1"
    need_root(case)
    # of the whole machine, no namespace has its own: for a moment, and only where one said so
    if not os.environ.get("ROWSTREAM_CHANGE_SYSCTL"):
        skip(case, "changes the whole machine: only with ROWSTREAM_CHANGE_SYSCTL=1")
    sysctl = Path("/proc/sys/kernel/io_uring_disabled")
    if not os.access(sysctl, os.W_OK):
        skip(case, f"{sysctl} cannot be written")
    before = sysctl.read_text()
    try:
        try:
            sysctl.write_text("1")  # root may go on
        except OSError as error:
            skip(case, f"{sysctl}: {error.strerror}")
        found = look(case, *plain, f"drop_root({8 << 20})", "an ordinary user")
    finally:
        sysctl.write_text(before)
    assert found["reader"] == "pool"
    assert "Operation not permitted (EPERM)" in found["io_uring"]
    assert "sysctl kernel.io_uring_disabled=0" in found["io_uring"]
