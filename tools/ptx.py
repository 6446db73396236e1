"""Compile src/rowstream/device/kernels.cu to the PTX that the package carries, and assemble it.

For maintainers: needs NVIDIA's NVRTC and, for the report of registers, ptxas; both are on PyPI
(`make ptx` installs them). The oldest CUDA 12 is used on purpose: PTX is taken by drivers of its
own toolkit and later ones, and that one's is from 2022.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "src" / "rowstream" / "device" / "kernels.cu"
TARGET = SOURCE.with_suffix(".ptx")
OPTIONS = ("--gpu-architecture=compute_70", "--std=c++17")
ASSEMBLED = ("sm_70", "sm_80", "sm_90")


def packaged(pattern: str) -> str | None:
    """A file of one of NVIDIA's packages on the import path, or None."""
    for folder in sys.path:
        for found in sorted((Path(folder) / "nvidia").glob(pattern)):
            return str(found)
    return None


def compiled(source: bytes) -> tuple[str, str]:
    """PTX of the source, and the version of NVRTC that made it."""
    nvrtc = ctypes.CDLL(packaged("cuda_nvrtc/lib/libnvrtc.so.12") or "libnvrtc.so.12")
    program = ctypes.c_void_p()
    size = ctypes.c_size_t()

    def call(name: str, *arguments: object) -> int:
        return int(getattr(nvrtc, name)(*arguments))

    def text(kind: str) -> str:
        call(f"nvrtcGet{kind}Size", program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        call(f"nvrtcGet{kind}", program, buffer)
        return buffer.value.decode()

    major, minor = ctypes.c_int(), ctypes.c_int()
    call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    call("nvrtcCreateProgram", ctypes.byref(program), source, SOURCE.name.encode(), 0, None, None)
    options = (ctypes.c_char_p * len(OPTIONS))(*(option.encode() for option in OPTIONS))
    failed = call("nvrtcCompileProgram", program, len(OPTIONS), options)
    log = text("ProgramLog").strip()
    if log:
        print(log, file=sys.stderr)
    if failed:
        raise SystemExit(f"{SOURCE.name}: NVRTC reports error {failed}")
    return text("PTX"), f"{major.value}.{minor.value}"


def assemble(ptx: Path) -> None:
    """Print registers and spills for each architecture; fail where the assembler does."""
    ptxas = packaged("cuda_nvcc/bin/ptxas") or shutil.which("ptxas")
    if ptxas is None:
        print("ptxas not found: the PTX was not assembled", file=sys.stderr)
        return
    if not os.access(ptxas, os.X_OK):  # pip does not keep the mode
        os.chmod(ptxas, 0o755)
    for architecture in ASSEMBLED:
        with tempfile.TemporaryDirectory() as folder:
            run = subprocess.run(
                [ptxas, "-v", f"-arch={architecture}", "-o", f"{folder}/out.cubin", str(ptx)],
                capture_output=True,
                text=True,
                check=False,
            )
        if run.returncode:
            raise SystemExit(f"{ptx.name}: {architecture}: {run.stdout}{run.stderr}")
        names = re.findall(r"Compiling entry function '(\w+)'", run.stderr)
        used = re.findall(r"Used (\d+) registers", run.stderr)
        spills = sum(map(int, re.findall(r"(\d+) bytes spill", run.stderr)))
        listed = ", ".join(f"{name} {count}" for name, count in zip(names, used, strict=True))
        print(f"{architecture}: registers {listed}; {spills} bytes spilled")


def main() -> int:
    source = SOURCE.read_bytes()
    ptx, version = compiled(source)
    digest = hashlib.sha256(source).hexdigest()
    # the assembler takes comments before .version
    TARGET.write_text(
        f"// source: {SOURCE.name} sha256 {digest}\n"
        f"// made by tools/ptx.py with NVRTC {version} {' '.join(OPTIONS)}\n"
        + re.sub(r"\A(//.*\n|\s*\n)*", "", ptx).rstrip("\x00\n")
        + "\n"
    )
    print(f"{TARGET.relative_to(ROOT)}: {TARGET.stat().st_size} bytes")
    assemble(TARGET)
    return 0


if __name__ == "__main__":
    sys.exit(main())
