"""Page-locking an arena: what is asked of CuPy, and going on without it."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kv_tier import ArenaView
from kv_tier.page_lock import PageLock
from tests.kv_tier.arena_cases import LAYOUT, kv_of, lease, open_tier, store, write_heads


class CudaError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"error {status}")
        self.status = status


class FakeCupy:
    """What CuPy and the driver do with registrations, for one process and one GPU."""

    def __init__(self, *, error: int | None = None) -> None:
        self.error = error
        self.registered: dict[int, tuple[int, int]] = {}
        self.device_idx: int | None = None
        self.cuda = SimpleNamespace(Device=self.device, runtime=self)
        self.CUDARuntimeError = CudaError

    def load(self) -> Any:
        return self

    def device(self, device_idx: int) -> "FakeCupy":
        self.chosen = device_idx
        return self

    def __enter__(self) -> None:
        self.device_idx = self.chosen

    def __exit__(self, *_: object) -> None:
        self.device_idx = None

    def hostRegister(self, ptr: int, size: int, flags: int) -> None:
        assert self.device_idx == 3
        if self.error is not None:
            raise CudaError(self.error)
        if ptr in self.registered:
            raise CudaError(712)
        self.registered[ptr] = (size, flags)

    def hostUnregister(self, ptr: int) -> None:
        if ptr not in self.registered:
            raise CudaError(713)
        del self.registered[ptr]


@pytest.fixture
def view(tmp_path: Path) -> ArenaView:
    with open_tier(tmp_path) as tier:
        write_heads(ArenaView(tmp_path, LAYOUT), store(tier, 1, 2), 1, 0, 4)
    return ArenaView(tmp_path, LAYOUT)


def test_the_whole_mapping_is_locked_until_close(view: ArenaView) -> None:
    cupy = FakeCupy()
    with PageLock(view.mapping, device_idx=3, import_cupy=cupy.load) as lock:
        assert lock.is_locked and lock.problem is None
        assert cupy.registered == {view.mapping.data_ptr(): (8 * 4096, 1)}
    assert not lock.is_locked
    assert cupy.registered == {}
    lock.close()


def test_a_second_lock_finds_it_done_and_does_not_undo_it(view: ArenaView) -> None:
    cupy = FakeCupy()
    with PageLock(view.mapping, device_idx=3, import_cupy=cupy.load):
        second = PageLock(view.mapping, device_idx=3, import_cupy=cupy.load)
        assert second.is_locked
        second.close()
        assert len(cupy.registered) == 1
    assert cupy.registered == {}


def test_every_mapping_of_a_process_is_locked_by_itself(view: ArenaView, tmp_path: Path) -> None:
    cupy = FakeCupy()
    other = ArenaView(tmp_path, LAYOUT)
    locks = [PageLock(each.mapping, device_idx=3, import_cupy=cupy.load) for each in (view, other)]
    assert len(cupy.registered) == 2
    locks[0].close()
    assert list(cupy.registered) == [other.mapping.data_ptr()]


def test_without_cupy_or_a_gpu_there_is_a_reason(view: ArenaView) -> None:
    def missing() -> Any:
        raise ImportError("libcuda.so.1 was not found")

    with PageLock(view.mapping, device_idx=3, import_cupy=missing) as lock:
        assert not lock.is_locked
        assert lock.problem == "CuPy can not be imported: libcuda.so.1 was not found"
    with PageLock(view.mapping, device_idx=3, import_cupy=FakeCupy(error=100).load) as lock:
        assert not lock.is_locked
        assert lock.problem == "32768 bytes can not be registered: error 100"
    assert "error 100" in lock.problem


def test_a_gpu_that_is_gone_at_close_is_no_error(view: ArenaView) -> None:
    cupy = FakeCupy()
    lock = PageLock(view.mapping, device_idx=3, import_cupy=cupy.load)
    cupy.registered.clear()
    lock.close()
    assert lock.problem == "it was closed, with error 713"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_machine_without_a_gpu_goes_on_unlocked(view: ArenaView) -> None:
    with PageLock(view.mapping, device_idx=0) as lock:
        assert not lock.is_locked and lock.problem


@pytest.mark.gpu
def test_a_leased_layer_goes_to_the_gpu_from_locked_memory(tmp_path: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    with open_tier(tmp_path, num_granules=64) as tier:
        view = ArenaView(tmp_path, LAYOUT)
        write_heads(view, store(tier, 1, 2), 1, 0, 4)
        found = lease(tier, 1, 2)
        assert found is not None
        with PageLock(view.mapping, device_idx=device.index) as lock:
            assert lock.problem is None
            for layer in range(LAYOUT.num_layers):
                k, v = view.read_layer(found.location, layer, 1, 2)
                assert k.is_pinned() and v.is_pinned()
                arrived = [kept.to(device, non_blocking=True) for kept in (k, v)]
                torch.cuda.synchronize(device)
                wanted = kv_of(1, layer, found.location.num_tokens)[:, 1:3]
                assert torch.equal(torch.stack(arrived).cpu(), wanted)
            # locked memory is still the arena: others' writes show, and ours show to them
            write_heads(ArenaView(tmp_path, LAYOUT), found.location, 2, 0, 4)
            k, _ = view.read_layer(found.location, 0, 0, 4)
            assert torch.equal(k.to(device).cpu(), kv_of(2, 0, found.location.num_tokens)[0])
        assert not view.mapping.is_pinned()
        assert not lock.is_locked
