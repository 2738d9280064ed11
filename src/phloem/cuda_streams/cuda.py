"""CUDA: the driver of the device engine, streams, pinned memory. Nothing else imports CUDA.

What is used of the driver API beyond torch, through ctypes (which drops the GIL): streams of our
own of the lowest priority, which are not ordered with the default stream; a capture mode that lets
our threads work while another captures a graph; many copies in one call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Generator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from phloem.cuda_streams.driver import Addresses, BatchCopy
from phloem.cuda_streams.host import PinnedMemory
from phloem.cuda_streams.numa import near_pci_device
from phloem.errors import EngineDead, InvalidRequest

__all__ = ["CudaDriver"]

_NON_BLOCKING = 1
_RELAXED = 2
_BATCH_VERSION = 12080  # the first release with batched copies, and the form with `fail_index`
_SOURCE_IN_STREAM_ORDER = 1
_PREFER_OVERLAP = 1


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _CopyAttributes(ctypes.Structure):
    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_location", _Location),
        ("target_location", _Location),
        ("flags", ctypes.c_uint),
    )


_BatchCall = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,  # targets
    ctypes.c_void_p,  # sources
    ctypes.c_void_p,  # sizes
    ctypes.c_size_t,  # how many copies
    ctypes.c_void_p,  # attributes
    ctypes.c_void_p,  # for each attribute the first copy that it is for
    ctypes.c_size_t,  # how many attributes
    ctypes.c_void_p,  # fail_index
    ctypes.c_void_p,  # stream
)


class CudaDriver:
    """The `Driver` of one CUDA device. Raises InvalidRequest where there is none.

    The thread that makes it is left as it was.
    """

    def __init__(self, device: str | torch.device) -> None:
        self.device = torch.device(device)
        cuda = torch.version.cuda is not None and torch.cuda.is_available()
        if self.device.type != "cuda" or not cuda:
            raise InvalidRequest(f"no CUDA device {device}")
        if str(self.device) == "cuda":
            self.device = torch.device("cuda", torch.cuda.current_device())
        if self.device.index >= torch.cuda.device_count():
            raise InvalidRequest(f"no CUDA device {device}; there are {torch.cuda.device_count()}")
        self._library = ctypes.CDLL("libcuda.so.1")
        self._check(self._library.cuInit(ctypes.c_uint(0)))
        self.near = near_pci_device(self._bus_id())
        self.batch_copy: BatchCopy | None = self._tried(self._find_batch_copy())

    def enter_thread(self) -> None:
        """Be near the device, make it current; and allow queries while others capture graphs."""
        self.near.bind_thread()
        mode = ctypes.c_int(_RELAXED)
        self._check(self._library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)))
        torch.cuda.set_device(self.device)
        torch.cuda.mem_get_info(self.device)  # setting alone may leave the thread without context

    def settle(self) -> None:
        """See `Driver.settle`."""
        torch.cuda.synchronize(self.device)

    def pinned_memory(self) -> PinnedMemory:
        """See `Driver.pinned_memory`."""
        return PinnedMemory(self._register, self._unregister, enter_thread=self.near.bind_thread)

    def new_stream(self, name: str) -> torch.cuda.Stream:
        """A stream of our own: torch's come from a pool, where two owners may share one."""
        del name
        with torch.cuda.device(self.device):
            torch.cuda.mem_get_info()
            least, greatest, handle = ctypes.c_int(), ctypes.c_int(), ctypes.c_void_p()
            self._check(
                self._library.cuCtxGetStreamPriorityRange(
                    ctypes.byref(least), ctypes.byref(greatest)
                )
            )
            self._check(
                self._library.cuStreamCreateWithPriority(
                    ctypes.byref(handle), ctypes.c_uint(_NON_BLOCKING), least
                )
            )
        assert handle.value is not None
        # torch has not typed it.
        return torch.cuda.ExternalStream(  # type: ignore[no-untyped-call]
            handle.value, device=self.device
        )

    def check_stream(self, stream: object) -> None:
        """See `Driver.check_stream`."""
        cuda = _cuda(stream)
        if cuda.device != self.device:
            raise InvalidRequest(f"{cuda!r} is not on {self.device}")
        capturing = ctypes.c_int()
        handle = ctypes.c_void_p(cuda.cuda_stream)
        if self._library.cuStreamIsCapturing(handle, ctypes.byref(capturing)) and not self.alive():
            raise EngineDead(f"{self.device} answers no more")
        if capturing.value:
            raise InvalidRequest(f"{cuda!r} is capturing a graph: nothing runs on it")

    def close_stream(self, stream: object) -> None:
        """Destroy a stream of `new_stream`; left alone when the device is lost."""
        if self.alive():
            self._check(
                self._library.cuStreamDestroy_v2(ctypes.c_void_p(_cuda(stream).cuda_stream))
            )

    def empty(self, stream: object, nbytes: int) -> Tensor:
        """Memory for work on that stream alone: the allocator may know no other."""
        with torch.inference_mode(False), torch.cuda.stream(_cuda(stream)):
            return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    @contextmanager
    def current(self, stream: object) -> Generator[None]:
        """See `Driver.current`."""
        with torch.cuda.stream(_cuda(stream)):
            yield

    def enqueue(self, stream: object, fn: Callable[[], None]) -> None:
        """See `Driver.enqueue`."""
        with torch.cuda.stream(_cuda(stream)):
            fn()

    def record(self, stream: object) -> object:
        """A fresh event each time: one used again would make older waits lie."""
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # torch's
        event.record(_cuda(stream))
        return event

    def wait_event(self, stream: object, event: object) -> None:
        """See `Driver.wait_event`. Raises InvalidRequest for an event of another kind of device."""
        if not isinstance(event, torch.cuda.Event):
            raise InvalidRequest(f"{event!r} is no CUDA event")
        _cuda(stream).wait_event(event)

    def synchronize(self, event: object) -> None:
        """See `Driver.synchronize`. Sleeps: the event is a blocking one."""
        assert isinstance(event, torch.cuda.Event)
        event.synchronize()

    def alive(self) -> bool:
        """See `Driver.alive`: after an error that stays, every call fails."""
        try:
            torch.cuda.mem_get_info(self.device)
        except RuntimeError:
            return False
        return True

    def _register(self, address: int, nbytes: int) -> None:
        # The driver's own call: a refusal leaves no error behind for the next kernel launch.
        address_, size = ctypes.c_void_p(address), ctypes.c_size_t(nbytes)
        with torch.cuda.device(self.device):
            torch.cuda.mem_get_info()
            self._check(self._library.cuMemHostRegister_v2(address_, size, ctypes.c_uint(0)))

    def _unregister(self, address: int) -> None:
        if not self.alive():  # a lost device has nothing registered
            return
        with torch.cuda.device(self.device):  # finalisers run in any thread, with any device
            torch.cuda.mem_get_info()
            self._check(self._library.cuMemHostUnregister(ctypes.c_void_p(address)))

    def _bus_id(self) -> str:
        """The device's address, as `0000:3b:00.0`."""
        number, text = ctypes.c_int(), ctypes.create_string_buffer(32)
        self._check(self._library.cuDeviceGet(ctypes.byref(number), self.device.index))
        self._check(self._library.cuDeviceGetPCIBusId(text, len(text), number))
        return text.value.decode()

    def _check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"the CUDA driver answered {status}")

    def _find_batch_copy(self) -> BatchCopy | None:
        address, found = ctypes.c_void_p(), ctypes.c_int()
        status = self._library.cuGetProcAddress_v2(
            b"cuMemcpyBatchAsync",
            ctypes.byref(address),
            ctypes.c_int(_BATCH_VERSION),
            ctypes.c_uint64(0),
            ctypes.byref(found),
        )
        if status or not address.value:
            return None
        call = _BatchCall(address.value)

        def batch_copy(
            stream: object, targets: Addresses, sources: Addresses, sizes: Addresses
        ) -> None:
            # In stream order: a source may be written by what the stream has waited for.
            attributes = _CopyAttributes(
                _SOURCE_IN_STREAM_ORDER, _Location(0, 0), _Location(0, 0), _PREFER_OVERLAP
            )
            first, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
            self._check(
                call(
                    targets.ctypes.data,
                    sources.ctypes.data,
                    sizes.ctypes.data,
                    len(sizes),
                    ctypes.addressof(attributes),
                    ctypes.addressof(first),
                    1,
                    ctypes.addressof(failed),
                    _cuda(stream).cuda_stream,
                )
            )

        return batch_copy

    def _tried(self, batch_copy: BatchCopy | None) -> BatchCopy | None:
        """The same if it carries a few bytes there and back, else None: drivers differ."""
        if batch_copy is None:
            return None
        stream = self.new_stream("trial")
        there = self.empty(stream, 64)
        source = torch.arange(64, dtype=torch.uint8).pin_memory()
        back = torch.zeros(64, dtype=torch.uint8).pin_memory()
        try:
            for target, origin in ((there, source), (back, there)):
                addresses = (target.data_ptr(), origin.data_ptr())
                starts = [np.array([at, at + 40], np.uint64) for at in addresses]
                batch_copy(stream, starts[0], starts[1], np.array([40, 24], np.uint64))
            self.synchronize(self.record(stream))
        except RuntimeError:
            return None
        finally:
            self.close_stream(stream)
        return batch_copy if torch.equal(source, back) else None


def _cuda(stream: object) -> torch.cuda.Stream:
    if not isinstance(stream, torch.cuda.Stream):
        raise InvalidRequest(f"{stream!r} is no CUDA stream")
    return stream
