"""How tensors are laid out for the library, and work for threads."""

from __future__ import annotations

import ctypes
import mmap

import torch
from torch import Tensor

from linattn.backends.cpu.library import TYPES, address

SMALL = 1 << 17  # multiplications, below which waking threads costs more than they save
WASTE = 1.15  # idle threads, as a factor of the time, that are accepted before more parts are made
LARGE = (
    1 << 22
)  # bytes, from which on large pages are asked for: the first touch of small ones costs more than a kernel
_HUGE = getattr(mmap, "MADV_HUGEPAGE", None)
_advise = ctypes.CDLL(None).madvise if _HUGE is not None else None


def plain(x: Tensor | None) -> Tensor | None:
    """Contiguous and of a dtype that the library reads."""
    return None if x is None else (x if x.dtype in TYPES else x.float()).contiguous()


def type_of(x: Tensor | None) -> int:
    """The library's number of a dtype."""
    return 0 if x is None else TYPES[x.dtype]


def in_large_pages(x: Tensor) -> Tensor:
    """The same tensor, newly made, after asking for large pages where it is large; elsewhere nothing is done."""
    if _advise is not None and x.nbytes >= LARGE:
        start = -(-x.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        _advise(ctypes.c_void_p(start), ctypes.c_size_t(x.data_ptr() + x.nbytes - start), _HUGE)
    return x


def floats(*shape: int) -> Tensor:
    """Room for float32 numbers."""
    # on CPU whatever the default device is
    return in_large_pages(torch.empty(shape, dtype=torch.float32, device="cpu"))


def scratch(threads: int, needed: int) -> tuple[Tensor, int]:
    """Scratch for every thread, which must outlive the call, and where it starts: at a cache line."""
    memory = floats(threads * needed + 16)
    return memory, address(memory) + (-address(memory)) % 64


def threads_for(work: int) -> int:
    """How many threads that many multiplications are worth."""
    return 1 if work < SMALL else torch.get_num_threads()


def parts_for(rows: int, threads: int, most: int) -> int:
    """Into how many parts the columns of a row are split: the fewest that keep the threads busy."""

    def waste(parts: int) -> float:
        return -(-rows * parts // threads) * threads / (rows * parts)

    if threads == 1 or rows == 0:
        return 1
    enough = (parts for parts in range(1, most + 1) if waste(parts) <= WASTE)
    return next(enough, min(range(1, most + 1), key=waste))
