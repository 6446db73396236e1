"""docs/troubleshooting.md: what it lists is what comes, and all that comes is listed."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers.models.qwen4_exp")

import provoked_checkpoints  # noqa: F401
import provoked_commands  # noqa: F401
import provoked_device  # noqa: F401
import provoked_gpu  # noqa: F401
import provoked_headers  # noqa: F401
import provoked_models  # noqa: F401
import provoked_reads  # noqa: F401
import provoked_server  # noqa: F401
import provoked_table_paths  # noqa: F401
import provoked_tensors  # noqa: F401
from provocations import (
    ON_GPU,
    PACKAGE,
    PROVOCATIONS,
    Provocation,
    pattern,
    places,
    raised,
    said,
)

ROOT = Path(__file__).resolve().parents[1]
DOCUMENT = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")

_SHRINKS = "the file shrinks between two looks at it"
_SECOND = "a line of verify: the second path sees another file than the first, which took it"
# raises that no user meets, by module and function, and why
INTERNAL = {
    "device/lookup.py Lookup.check": "raises what one of its paths has raised",
    "engines/transformers.py check": "raises what one of its lookups has raised",
    "engines/transformers.py _open_stores": "what `tables` refuses before it is asked again",
    "engines/transformers.py _replace": "transformers derives another size from the same config",
    "formats/safetensors.py read_header": _SHRINKS,
    "formats/tensor.py Tensor.read": _SHRINKS,
    "placement.py _cached": "a reason of the choice of a backend, which goes on without",
    "profile.py _whole": "a stored profile that is none, which is measured anew",
    "runtime/generation.py Generation.__anext__": "the end of an iteration",
    "runtime/generation.py Generation.__next__": "the end of an iteration",
    "serve/exchange.py Exchange._while_connected": "nobody is left to be told",
    "synth/layout.py shard_tensors": "its one caller pads to whole shards",
    **{
        f"verify/second_path.py {function}": _SECOND
        for function in (
            *("SecondPath.__init__", "_bytes", "_entries", "_header", "_open", "_ordered", "_read"),
        )
    },
}
# texts of the core that Python, or the bindings, keep from users
_CHECKED = "manifests are checked in Python first"
_ARGUMENTS = "RowStore checks its arguments first"
_DEVICE = "what the kernels never post; a step is void for it"
_LOADER = "a table's own loader is asked for rows that there are, once"
INTERNAL_CORE = {
    " ids are no multiple of ... heads": _DEVICE,
    "a group has no heads": _ARGUMENTS,
    "a head has no rows": _CHECKED,
    "a plane has no extents": _CHECKED,
    "a mapped table is not in one piece of memory...a table of several planes is not in one piece "
    "of memory": "asked of pinned tables of one plane",
    "a row has no bytes": _CHECKED,
    "a table has more than 65535 files": _CHECKED,
    "a table has no planes": _CHECKED,
    "a token has more rows than a piece": _CHECKED,
    "block is ..., needs to be 0 or a power of two up to ": "a profile offers 512 and 4096",
    "eos ... is outside the vocabulary": _CHECKED,
    "extent at row ... ends past byte 2^48 of its file": _CHECKED,
    "extent names file ..., table has ": _CHECKED,
    "extent starts at row ... with ... rows, needs to go on at row ": _CHECKED,
    "hash constants do not fit: ... multipliers, ... sizes, ... offsets": _CHECKED,
    "ids to prefetch are not whole groups of ": _ARGUMENTS,
    "io_uring is too old or too small": "a reason in `reader uring: io_uring refused: ...`",
    "io_uring mmap": "a reason in `reader uring: io_uring refused: ...`",
    "io_uring_enter": "a ring that breaks while it is in use: the operating system's reason",
    "io_uring_setup": "a reason in `reader uring: io_uring refused: ...`",
    "loader is in use": _LOADER,
    "no such plane": _LOADER,
    "out needs rows of ... bytes, got ": _LOADER,
    "out needs shape [..., ..., ...]": _ARGUMENTS,
    "out needs shape [..., ...]": _ARGUMENTS,
    "planes differ in rows: ... and ": _CHECKED,
    "reader is one of auto, uring, pool, inline; got ": _ARGUMENTS,
    "reads of an earlier load did not end": _LOADER,
    "row_ids have ... columns, groups add up to ": _ARGUMENTS,
    "rows [..., ...) of a table of ": _LOADER,
    "the mailbox has more ids than there is room for": _DEVICE,
    "the store is closed": "a status of a void step, for which device/link.py has words",
}

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),
]


MESSAGES = {one.message for one in PROVOCATIONS} | {one.message for one in ON_GPU}


def listed() -> list[str]:
    """Every message of the tables: the code in their first cells."""
    rows = [line for line in DOCUMENT.splitlines() if line.startswith("| `")]
    assert all(len(re.split(r"(?<!\\) \| ", row)) == 3 for row in rows)
    return [text for row in rows for text in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def test_each_message_is_listed_once_and_each_one_is_provoked() -> None:
    assert sorted(listed()) == sorted(MESSAGES)


def test_what_needs_a_gpu_is_listed_with_gpus() -> None:
    (section,) = re.findall(r"^## On a GPU\n(.*?)^## ", DOCUMENT, re.DOTALL | re.MULTILINE)
    only_there = {one.message for one in ON_GPU} - {one.message for one in PROVOCATIONS}
    assert only_there
    assert not {message for message in only_there if f"`{message}`" not in section}


@pytest.mark.parametrize("one", PROVOCATIONS, ids=[one.name for one in PROVOCATIONS])
def test_a_message_is_as_listed(one: Provocation) -> None:
    error = raised(one)
    assert type(error) is one.kind
    text = said(error)
    assert pattern(one.message).fullmatch(text)
    assert text.isprintable()
    assert len(text) < 600


@pytest.mark.parametrize("message", sorted(MESSAGES))
def test_a_message_has_the_house_shape(message: str) -> None:
    if message.startswith(("<message>", "<what")):
        return  # made of others
    assert message[0].islower() or message[0] in "<-"
    assert not message.endswith((".", "!"))
    # a subject, then what is the matter with it
    assert re.match(
        r".+?(?:: | (?:needs?|has|have|is|was|are|cannot|does|failed|refuses|sees|takes) )", message
    )


def raises() -> Iterator[tuple[str, str, range]]:
    """Every place that raises: module, function, lines. `refuse` raises for its caller."""

    def visit(node: ast.AST, module: str, function: str) -> Iterator[tuple[str, str, range]]:
        for child in ast.iter_child_nodes(node):
            name = function
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                name = f"{function}.{child.name}".lstrip(".")
            refuses = (
                isinstance(child, ast.Expr)
                and isinstance(child.value, ast.Call)
                and isinstance(child.value.func, ast.Name)
                and child.value.func.id == "refuse"
            )
            if refuses or (isinstance(child, ast.Raise) and child.exc is not None):
                assert isinstance(child, ast.stmt)
                yield module, name, range(child.lineno, (child.end_lineno or child.lineno) + 1)
            yield from visit(child, module, name)

    for path in sorted(PACKAGE.rglob("*.py")):
        module = path.relative_to(PACKAGE).as_posix()
        yield from visit(ast.parse(path.read_text(encoding="utf-8")), module, "")


def test_every_raise_is_met_or_needs_a_gpu_or_internal() -> None:
    met = {place for one in PROVOCATIONS for place in places(raised(one))}
    unmet = [
        f"{module} {function}"
        for module, function, lines in raises()
        if f"{module} {function}" not in INTERNAL
        and not any((module, line) in met for line in lines)
    ]
    # each raise of its own: a second one of the same function is not met by what needs a GPU
    assert sorted(unmet) == sorted({one.place for one in ON_GPU})
    functions = {f"{module} {function}" for module, function, _ in raises()}
    assert not INTERNAL.keys() - functions


def thrown() -> Iterator[tuple[str, str]]:
    """Every text that the core throws: file, and its pieces with `...` between them."""
    site = re.compile(r"(?:throw \w[\w:]*|ReadFailure|Unavailable|fail)\(((?:[^;\"]|\"[^\"]*\")*);")
    for path in sorted((ROOT / "csrc").glob("*.cpp")):
        code = re.sub(r"//.*", "", path.read_text(encoding="utf-8"))
        for call in site.finditer(code):
            pieces = re.findall(r'"((?:[^"\\]|\\.)*)"', call[1])
            if pieces:
                yield path.name, "...".join(pieces)


def test_every_text_of_the_core_is_listed_or_internal() -> None:
    texts = set(thrown())
    assert len(texts) > 20
    messages = listed()

    def is_listed(text: str) -> bool:
        found = re.compile(".*".join(re.escape(piece) for piece in text.split("...")))
        return any(found.search(message) for message in messages)

    assert not {
        (file, text) for file, text in texts if text not in INTERNAL_CORE and not is_listed(text)
    }
    assert not INTERNAL_CORE.keys() - {text for _, text in texts}
