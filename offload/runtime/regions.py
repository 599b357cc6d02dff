"""Regions of memories: whether they lie where they should, and copying one to another."""

from __future__ import annotations

import ctypes

from offload.runtime.device import Region


def check_region(region: Region) -> None:
    """Raise ValueError unless the region lies inside its memory."""
    if region.offset < 0 or region.nbytes < 0:
        raise ValueError(
            f"region of '{region.memory.name}' has a negative offset or size: {region}"
        )
    if region.offset + region.nbytes > region.memory.nbytes:
        raise ValueError(
            f"bytes [{region.offset}, {region.offset + region.nbytes}) are outside memory "
            f"'{region.memory.name}' of {region.memory.nbytes} bytes"
        )


def check_copy(dst: Region, src: Region) -> None:
    """Raise ValueError unless ``src`` fits into ``dst`` and both lie inside their memories."""
    check_region(dst)
    check_region(src)
    if dst.nbytes < src.nbytes:
        raise ValueError(
            f"cannot copy {src.nbytes} bytes of '{src.memory.name}' into a region of "
            f"{dst.nbytes} bytes of '{dst.memory.name}'"
        )


def copy_bytes(dst: Region, src: Region, start: int = 0, stop: int | None = None) -> None:
    """Copy bytes [start, stop) of ``src`` to the same place of ``dst``, now, without the GIL.

    In this thread alone: torch's own copy asks a team of threads for help, and ends when the last
    one has had a core. With as many other threads at work as there are cores that was 5 ms for a
    megabyte.
    """
    stop = src.nbytes if stop is None else stop
    if stop <= start:
        return
    into = dst.memory.tensor()[dst.offset + start : dst.offset + stop]
    of = src.memory.tensor()[src.offset + start : src.offset + stop]
    if into.numel() != of.numel():
        raise ValueError(f"{of.numel()} bytes do not go into {into.numel()}")
    ctypes.memmove(into.data_ptr(), of.data_ptr(), of.numel())
