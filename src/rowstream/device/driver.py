"""The few calls of the CUDA driver that a channel needs, over NVIDIA's `cuda-bindings`.

Streams, functions and memory are plain integers; the context is torch's primary one, current in
the calling thread. Importing this module needs neither torch nor CUDA.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any, NamedTuple

from rowstream.errors import UnavailableError

__all__ = [
    "Attributes",
    "attributes",
    "available",
    "bindings",
    "capturing",
    "check",
    "copy_async",
    "device_uuid",
    "driver_version",
    "host_function",
    "pin",
    "retain_in_graph",
    "unpin",
    "use_primary_context",
    "wait_and_reset",
]

# what this machine cannot do, as opposed to what went wrong in a call
_UNAVAILABLE = {
    "CUDA_ERROR_STUB_LIBRARY",
    "CUDA_ERROR_INSUFFICIENT_DRIVER",
    "CUDA_ERROR_NO_DEVICE",
    "CUDA_ERROR_DEVICE_UNAVAILABLE",
    "CUDA_ERROR_NO_BINARY_FOR_GPU",
    "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
    "CUDA_ERROR_JIT_COMPILER_NOT_FOUND",
    "CUDA_ERROR_NOT_PERMITTED",
    "CUDA_ERROR_NOT_SUPPORTED",
    "CUDA_ERROR_SYSTEM_NOT_READY",
    "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
    "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
}

# "0000:1b:00.0" with a domain of up to eight digits, and the terminator
_BUS_ID_BYTES = 17


@functools.cache
def bindings() -> Any:
    """The module `cuda.bindings.driver`; raises UnavailableError where it is not installed."""
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise UnavailableError(
            f"cuda-bindings needs to be installed (pip install 'rowstream[cuda]'): {error}"
        ) from error
    return driver


def check(result: tuple[Any, ...], what: str) -> Any:
    """Unpack what a call of cuda-bindings returned: None, the value, or the tuple of values.

    `what` begins the message. Raises UnavailableError for what this machine cannot do and
    RuntimeError for any other failure, with the driver's own name of it.
    """
    code, *values = result
    if int(code) == 0:
        return None if not values else values[0] if len(values) == 1 else tuple(values)
    name, reason = _error(code)
    message = f"{what}: {name} ({reason})" if reason else f"{what}: {name}"
    if name in _UNAVAILABLE:
        raise UnavailableError(message, probe=what)
    raise RuntimeError(message)


def available(device: int | None = None) -> tuple[bool, str]:
    """Whether the device path can run on a device, or on any, and one line that says why (not).

    Does not initialize CUDA where torch has no GPU.
    """
    try:
        import torch
    except ImportError as error:
        return False, f"torch cannot be imported: {error}"
    if torch.version.cuda is None:
        return False, f"torch {torch.__version__} is built without CUDA"
    if not torch.cuda.is_available():
        return False, f"torch {torch.__version__} sees no GPU"
    try:
        cuda = bindings()
        check(cuda.cuInit(0), "cuInit")
        wanted = range(torch.cuda.device_count()) if device is None else [device]
        found = [attributes(index) for index in wanted]
    # cuda-bindings raises RuntimeError of its own where libcuda or a function of it is missing
    except RuntimeError as error:
        return False, str(error)
    able = [each for each in found if each.compute_capability >= (7, 0)]
    if not able:
        has = ".".join(map(str, found[0].compute_capability))
        return False, f"{found[0].name}: the kernels need compute capability 7.0, it has {has}"
    return True, f"{len(able)} x {able[0].name}, driver {driver_version()}"


# --- memory -----------------------------------------------------------------------------------


def pin(address: int, num_bytes: int) -> int:
    """Register host memory for every context and map it; return its address on the device.

    Ordinary write-back memory, which must stay mapped until `unpin`.
    """
    cuda = bindings()
    flags = cuda.CU_MEMHOSTREGISTER_PORTABLE | cuda.CU_MEMHOSTREGISTER_DEVICEMAP
    what = f"cuMemHostRegister of {num_bytes} bytes"
    check(cuda.cuMemHostRegister(address, num_bytes, flags), what)
    try:
        mapped = cuda.cuMemHostGetDevicePointer(address, 0)
        return int(check(mapped, "cuMemHostGetDevicePointer"))
    except BaseException:
        unpin(address)
        raise


def unpin(address: int) -> None:
    """Undo `pin`; no graph or stream may use the memory any more."""
    check(bindings().cuMemHostUnregister(address), "cuMemHostUnregister")


def copy_async(stream: int, destination: int, source: int, num_bytes: int) -> None:
    """Copy from pinned host memory to the device, in the stream's order."""
    result = bindings().cuMemcpyHtoDAsync(destination, source, num_bytes, stream)
    check(result, "cuMemcpyHtoDAsync")


# --- streams ----------------------------------------------------------------------------------


@functools.cache
def _library() -> ctypes.CDLL:
    """The driver itself, for the calls that cuda-bindings does not pass on as they are.

    Since 12.9 it calls host functions and destructors through a wrapper that takes the interpreter
    lock: a thread that holds it and waits for the stream would never be let go. The ways to ask
    for a capture's graph differ between its versions.
    """
    library = ctypes.CDLL("libcuda.so.1")
    pointer = ctypes.c_void_p
    library.cuLaunchHostFunc.argtypes = [pointer, pointer, pointer]
    library.cuUserObjectCreate.argtypes = [
        ctypes.POINTER(pointer),
        pointer,
        pointer,
        ctypes.c_uint,
        ctypes.c_uint,
    ]
    return library


class _Capture:
    """Room for what the driver says of a capture besides its graph."""

    def __init__(self) -> None:
        self.status = ctypes.c_int()
        self.id = ctypes.c_uint64()
        self.nodes = ctypes.c_void_p()
        self.edges = ctypes.c_void_p()
        self.count = ctypes.c_size_t()


@functools.lru_cache(maxsize=4096)
def _wait_and_reset(flag: int) -> list[Any]:
    cuda = bindings()
    kinds = cuda.CUstreamBatchMemOpType
    wait = cuda.CUstreamBatchMemOpParams()
    wait.waitValue.operation = kinds.CU_STREAM_MEM_OP_WAIT_VALUE_32
    wait.waitValue.address = cuda.CUdeviceptr(flag)
    wait.waitValue.value = cuda.cuuint32_t(1)
    wait.waitValue.flags = int(cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ)
    reset = cuda.CUstreamBatchMemOpParams()
    reset.writeValue.operation = kinds.CU_STREAM_MEM_OP_WRITE_VALUE_32
    reset.writeValue.address = cuda.CUdeviceptr(flag)
    reset.writeValue.value = cuda.cuuint32_t(0)
    # The default has the fence: without it the reset may land after the host's next signal.
    reset.writeValue.flags = int(cuda.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT)
    return [wait, reset]


def wait_and_reset(stream: int, flag: int) -> None:
    """Let the stream wait until the u32 at device address `flag` is at least 1, then write 0.

    One operation, and one node in a graph. Not a kernel's work: the next wait of the stream may be
    looked at before a kernel ahead of it has run.
    """
    result = bindings().cuStreamBatchMemOp(stream, 2, _wait_and_reset(flag), 0)
    check(result, "cuStreamBatchMemOp")


def host_function(stream: int, function: int, argument: int) -> None:
    """Call the C function `void(void*)` at address `function` in the stream's order.

    It runs on a thread of the driver, and may not call CUDA.
    """
    result = _library().cuLaunchHostFunc(stream, function, argument)
    check((bindings().CUresult(result),), "cuLaunchHostFunc")


def capturing(stream: int) -> bool:
    """Whether the stream is being captured into a graph."""
    cuda = bindings()
    status = check(cuda.cuStreamIsCapturing(stream), "cuStreamIsCapturing")
    return int(status) == int(cuda.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE)


def retain_in_graph(stream: int, destructor: int, argument: int) -> bool:
    """Have `destructor(argument)` called once the graph that the stream captures is gone.

    That is the graph and every executable made of it. `destructor` is the address of a C function
    `void(void*)`; it runs on any thread, and may not call CUDA. Returns False, and does nothing,
    where the stream does not capture. Where the driver refuses, the error is raised and the
    destructor has not been called and will not be.
    """
    cuda, library = bindings(), _library()
    if not capturing(stream):
        return False
    capture, graph = _Capture(), ctypes.c_void_p()
    # Every output is asked for: the driver calls it lossy where an edge has data and this does not.
    outputs = [ctypes.byref(field) for field in (capture.status, capture.id, graph, capture.nodes)]
    if hasattr(library, "cuStreamGetCaptureInfo_v3"):
        outputs.append(ctypes.byref(capture.edges))
        ask = library.cuStreamGetCaptureInfo_v3
    else:  # drivers before CUDA 12.3
        ask = library.cuStreamGetCaptureInfo_v2
    result = ask(ctypes.c_void_p(stream), *outputs, ctypes.byref(capture.count))
    check((cuda.CUresult(result),), "cuStreamGetCaptureInfo")

    no_sync = int(cuda.CUuserObject_flags.CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
    move = int(cuda.CUuserObjectRetain_flags.CU_GRAPH_USER_OBJECT_MOVE)
    owner = ctypes.c_void_p()
    result = library.cuUserObjectCreate(ctypes.byref(owner), argument, destructor, 1, no_sync)
    check((cuda.CUresult(result),), "cuUserObjectCreate")
    # A refusal leaks the object: to release it would call the destructor of what is still owned.
    retained = cuda.cuGraphRetainUserObject(graph.value, owner.value, 1, move)
    check(retained, "cuGraphRetainUserObject")
    return True


# --- devices ----------------------------------------------------------------------------------


class Attributes(NamedTuple):
    """What the choice of a path depends on."""

    name: str
    compute_capability: tuple[int, int]
    multiprocessors: int
    stream_mem_ops_64: bool
    """64-bit stream memory operations; the 32-bit ones need no capability, only a probe."""
    pageable_uses_host_page_tables: bool
    """The GPU reads any host memory, files mapped into it included."""
    pci_bus_id: str
    numa_node: int | None


def attributes(device: int) -> Attributes:
    """Ask for the attributes of torch's device `device`; makes no context."""
    cuda = bindings()
    check(cuda.cuInit(0), "cuInit")
    handle = check(cuda.cuDeviceGet(device), f"device {device}")
    kinds = cuda.CUdevice_attribute

    def attribute(name: str) -> int:
        kind = getattr(kinds, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(cuda.cuDeviceGetAttribute(kind, handle), name.lower()))

    name = check(cuda.cuDeviceGetName(256, handle), "cuDeviceGetName")
    bus_id = check(cuda.cuDeviceGetPCIBusId(_BUS_ID_BYTES, handle), "cuDeviceGetPCIBusId")
    bus_id = bus_id.split(b"\0")[0].decode().strip().lower()
    return Attributes(
        name=name.split(b"\0")[0].decode(),
        compute_capability=(
            attribute("COMPUTE_CAPABILITY_MAJOR"),
            attribute("COMPUTE_CAPABILITY_MINOR"),
        ),
        multiprocessors=attribute("MULTIPROCESSOR_COUNT"),
        stream_mem_ops_64=bool(attribute("CAN_USE_64_BIT_STREAM_MEM_OPS")),
        pageable_uses_host_page_tables=bool(
            attribute("PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES")
        ),
        pci_bus_id=bus_id,
        numa_node=_numa_node(bus_id),
    )


def device_uuid(device: int) -> str:
    """The UUID of a device, or of the part of it that MIG gives, as 32 hexadecimal digits."""
    cuda = bindings()
    check(cuda.cuInit(0), "cuInit")
    handle = check(cuda.cuDeviceGet(device), f"device {device}")
    # 12.x: the first version has the UUID of the whole GPU; 13.x: the second is the only one
    ask = getattr(cuda, "cuDeviceGetUuid_v2", cuda.cuDeviceGetUuid)
    return str(bytes(check(ask(handle), "cuDeviceGetUuid").bytes).hex())


def driver_version() -> str:
    """The driver's CUDA version and, where it can be read, the kernel module's: `13000 580.95`."""
    version = str(check(bindings().cuDriverGetVersion(), "cuDriverGetVersion"))
    try:
        return f"{version} {Path('/sys/module/nvidia/version').read_text().strip()}"
    except OSError:
        return version


def use_primary_context(device: int) -> None:
    """Make the context that torch uses on `device` current in this thread."""
    context = _primary_context(device)
    check(bindings().cuCtxSetCurrent(context), "cuCtxSetCurrent")


@functools.cache
def _primary_context(device: int) -> Any:
    # never released: torch holds it for the life of the process as well
    cuda = bindings()
    check(cuda.cuInit(0), "cuInit")
    handle = check(cuda.cuDeviceGet(device), f"device {device}")
    return check(cuda.cuDevicePrimaryCtxRetain(handle), f"context of device {device}")


def _numa_node(bus_id: str) -> int | None:
    try:
        node = int(Path(f"/sys/bus/pci/devices/{bus_id}/numa_node").read_text())
    except (OSError, ValueError):
        return None
    return None if node < 0 else node  # -1: the machine has one node, or the firmware does not say


def _error(code: Any) -> tuple[str, str]:
    name = str(getattr(code, "name", code))
    try:
        status, text = bindings().cuGetErrorString(code)
    except RuntimeError:  # the error may be that there is no driver to ask
        return name, ""
    return name, text.decode() if int(status) == 0 and text else ""
