"""Page-lock an arena's mapping in this process, so that copies to its GPU run by themselves.

A copy from pageable memory goes through a buffer of the driver, and its caller waits. Page-locking
belongs to a process and its mapping: every GPU process locks its own, all lock the same pages.
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from torch import Tensor

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked to every GPU of the process, not to one
_ALREADY_REGISTERED = 712  # cudaErrorHostMemoryAlreadyRegistered


def _import_cupy() -> Any:
    import cupy  # here: only installations for GPUs have it, and importing it looks for one

    return cupy


class PageLock:
    """A mapping that is page-locked until `close`, or the reason why it is not.

    Without a lock everything works the same, only slower, so nothing is raised: log `problem`, and
    go on. Close it before the process drops its last view of the arena; a process that ends need
    not. Keeps the mapping alive.
    """

    def __init__(
        self,
        mapping: Tensor,
        *,
        device_idx: int,
        import_cupy: Callable[[], Any] = _import_cupy,
    ) -> None:
        """mapping: [arena_bytes], uint8, `ArenaView.mapping`; locked whole, which touches each page

        device_idx: a GPU that this process uses; locking on another would start a context there
        """
        self.problem: str | None = None  # in words, if the mapping is not page-locked
        self._mapping = mapping
        self._cupy: Any = None  # while there is a registration of ours to undo
        try:
            cupy = import_cupy()
        except ImportError as exc:
            self.problem = f"CuPy can not be imported: {exc}"
            return
        try:
            with cupy.cuda.Device(device_idx):
                cupy.cuda.runtime.hostRegister(mapping.data_ptr(), mapping.nbytes, _PORTABLE)
        except cupy.cuda.runtime.CUDARuntimeError as exc:
            if exc.status != _ALREADY_REGISTERED:  # else another lock of this process holds it
                self.problem = f"{mapping.nbytes} bytes can not be registered: {exc}"
            return
        self._cupy = cupy

    @property
    def is_locked(self) -> bool:
        """Whether the mapping was found or made page-locked, and this was not closed since."""
        return self.problem is None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Undo it, if this object did it. Wait for the GPU's copies first. May be called twice."""
        cupy, self._cupy = self._cupy, None
        self.problem = self.problem or "it was closed"
        if cupy is None:
            return
        try:
            cupy.cuda.runtime.hostUnregister(self._mapping.data_ptr())
        except cupy.cuda.runtime.CUDARuntimeError as exc:
            # the GPU or its context is gone, and the registration with it
            self.problem = f"it was closed, with {exc}"
