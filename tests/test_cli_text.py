"""Sizes, fields and the line of progress as commands print them."""

from __future__ import annotations

import io

from rowstream.cli.progress import Progress
from rowstream.cli.text import fields, size


def test_sizes() -> None:
    assert [size(n) for n in (0, 1, 1023)] == ["0 bytes", "1 byte", "1,023 bytes"]
    assert [size(n) for n in (1024, 1536, 2**20, 51_200_245_760, 2**40, 2**52)] == [
        "1.00 KiB",
        "1.50 KiB",
        "1.00 MiB",
        "47.68 GiB",
        "1.00 TiB",
        "4096.00 TiB",
    ]


def test_fields_align_and_keep_further_lines_under_the_first() -> None:
    assert fields([("a", "1\n2"), ("long", "3")]) == "  a     1\n        2\n  long  3"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_draws_on_a_terminal_only_and_clears_its_line() -> None:
    quiet, terminal = io.StringIO(), _Terminal()
    for stream in (quiet, terminal):
        with Progress("writing", stream) as progress:
            progress(0, 200)
            progress(200, 200)
    assert quiet.getvalue() == ""
    drawn = terminal.getvalue().split("\r")
    assert drawn[1].startswith("writing [")
    assert "  0%" in drawn[1]
    assert "100%  200 bytes of 200 bytes" in drawn[2]
    assert drawn[-1] == "\x1b[K"


def test_progress_draws_ten_times_a_second_at_most() -> None:
    terminal = _Terminal()
    with Progress("writing", terminal) as progress:
        for done in range(1000):
            progress(done, 1001)
    assert terminal.getvalue().count("writing [") < 20
