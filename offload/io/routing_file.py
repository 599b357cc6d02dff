"""A file of what a router chose: for each MoE layer and token, experts and scores.

Format, version 1, little-endian throughout::

    offload-routing 1\\n
    {"layers": [...], "experts": [...], "model": "..."}\\n      JSON on one line
    record*                                                    in the order of the run
    end

    record   uint32 T ≥ 1 tokens, uint16 layer, uint8 k, uint8 p ≥ k
             T × p uint16 experts: first the k chosen ones, then the likeliest of the others
             T × p float16 scores of the same: softmax of the router's logits
    end      uint32 0, uint16 0xffff, uint16 0, uint64 records, uint32 CRC-32 of all before it

An expert ``0xffff`` stands for none. One record is one run of a layer: T is the prompt's length,
or 1 while decoding. 16 bytes per layer and token at k = 2, 64 at k = 8.

The writer streams into a temporary file beside the target, private to the user: a routing tells
much about the text. Only a whole file gets the target's name.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from offload.errors import OffloadError, StoreError
from offload.io.whole_file import expanded, takes_bytes

VERSION = 1
NO_EXPERT = 0xFFFF
_MAGIC = b"offload-routing "
_RECORD = struct.Struct("<IHBB")
_END = struct.Struct("<IHHQI")
_END_LAYER = 0xFFFF
_LONGEST_HEADER = 1 << 24
BUFFER_BYTES = 64 * 2**10
"""Between the run and the file."""


class RoutingFileError(OffloadError):
    """A file is not a whole routing of a version that is known."""


@dataclass(frozen=True, slots=True)
class RoutingHeader:
    """Which layers a routing is of."""

    layers: tuple[str, ...]
    """Names in the order in which they run."""
    experts: tuple[int, ...]
    """Experts of each."""
    model: str = ""
    """The checkpoint's name, for people."""


@dataclass(frozen=True, slots=True)
class Record:
    """One run of one layer; token ``t`` has ``[t * width : (t + 1) * width]`` of the sequences."""

    layer: int
    tokens: int
    chosen: int
    """k: how many of a row's experts were used."""
    width: int
    experts: Sequence[int]
    scores: Sequence[float]


class RoutingWriter:
    """Writes one file. Not thread-safe. ``close`` publishes, ``abandon`` leaves no trace."""

    def __init__(self, path: str | os.PathLike[str], header: RoutingHeader) -> None:
        """Raises StoreError if the file cannot be made."""
        self.path = expanded(Path(path))
        self._direct = takes_bytes(self.path)
        """Into a pipe or device: nothing takes its place."""
        if not self._direct:
            self.path = self.path.resolve()
        if not header.layers or len(header.layers) != len(header.experts):
            raise ValueError("a routing needs layers, and for each its number of experts")
        if max(header.experts) >= NO_EXPERT or len(header.layers) >= _END_LAYER:
            raise StoreError(
                f"a routing file holds up to {NO_EXPERT - 1} experts per layer and "
                f"{_END_LAYER - 1} layers"
            )
        self._header = header
        self._records = 0
        self._crc = 0
        self._temporary = self.path.with_name(f".{self.path.name}.{os.getpid()}.tmp")
        self._file: BinaryIO | None = None
        if self.path.is_dir():
            raise StoreError(f"{self.path} is a directory; give a file for the routing")
        with self._told():
            if self._direct:
                fd = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC)
            else:
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
                fd = os.open(self._temporary, flags, 0o600)
                os.fchmod(fd, 0o600)  # of a file that a killed process with our number has left
            self._file = open(fd, "wb", buffering=BUFFER_BYTES)  # noqa: SIM115  closed in close()
            text = json.dumps(
                {"layers": header.layers, "experts": header.experts, "model": header.model}
            )
            self._write(_MAGIC + f"{VERSION}\n{text}\n".encode())

    def add(self, layer: int, chosen: int, width: int, experts: bytes, scores: bytes) -> None:
        """One run of a layer: T × width uint16 and float16, little-endian; see the module's text.

        Raises:
            StoreError: it cannot be written (a full disk); the file is given up.
            ValueError: the arguments contradict each other (a bug of the caller).
        """
        tokens, odd = divmod(len(experts), 2 * width)
        if odd or len(scores) != len(experts) or not 1 <= chosen <= width <= 255:
            raise ValueError(
                f"{len(experts)} and {len(scores)} bytes for {chosen} of {width} experts"
            )
        if not 0 <= layer < len(self._header.layers):
            raise ValueError(f"layer {layer} of {len(self._header.layers)}")
        if tokens and self._file is not None:
            with self._told():
                self._write(_RECORD.pack(tokens, layer, chosen, width), experts, scores)
            self._records += 1

    def close(self) -> None:
        """Write the end and give the file its name; whoever reads sees the old one or all of the
        new one. Idempotent; does nothing after ``abandon`` or a failed write.

        Raises:
            StoreError: it cannot be written.
        """
        if self._file is None:
            return
        with self._told():
            body = _END.pack(0, _END_LAYER, 0, self._records, 0)[:-4]
            self._write(body)
            self._file.write(self._crc.to_bytes(4, "little"))
            self._file.flush()
            if not self._direct:
                os.fsync(self._file.fileno())
            self._file.close()
            if not self._direct:
                os.replace(self._temporary, self.path)
        self._file = None

    def abandon(self) -> None:
        """Remove what was written. Idempotent."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()  # flushes: on a full disk that fails again
            if not self._direct:
                with contextlib.suppress(OSError):
                    self._temporary.unlink()

    def _write(self, *parts: bytes) -> None:
        if self._file is None:
            raise ValueError("the routing file is closed")
        for part in parts:
            self._file.write(part)
            self._crc = zlib.crc32(part, self._crc)

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.abandon()
            raise StoreError(
                f"the routing cannot be written to {self.path}: {error.strerror or error}; "
                "free some space or choose another file"
            ) from error


class RoutingReader:
    """Reads a routing file in one go, as often as asked. Checks whatever can be wrong."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises RoutingFileError."""
        self.path = Path(path)
        with self._open() as file:
            self.header = self._read_header(file)[0]

    def __iter__(self) -> Iterator[Record]:
        """The records; the file's end is checked when it is reached.

        Raises:
            RoutingFileError: truncated or damaged.
        """
        with self._open() as file:
            header, crc = self._read_header(file)
            records = 0
            while True:
                head = self._exactly(file, _RECORD.size)
                tokens, layer, chosen, width = _RECORD.unpack(head)
                if layer == _END_LAYER and not tokens:
                    break
                if layer >= len(header.layers) or not tokens or not 1 <= chosen <= width:
                    raise self._damaged(f"record {records} makes no sense")
                n = tokens * width
                body = self._exactly(file, 4 * n)
                experts = struct.unpack_from(f"<{n}H", body)
                limit = header.experts[layer]
                if any(e >= limit and e != NO_EXPERT for e in experts):
                    raise self._damaged(f"record {records} names an expert beyond {limit}")
                scores = struct.unpack_from(f"<{n}e", body, 2 * n)
                crc = zlib.crc32(body, zlib.crc32(head, crc))
                records += 1
                yield Record(layer, tokens, chosen, width, experts, scores)
            tail = self._exactly(file, _END.size - _RECORD.size)
            _, _, _, said, checksum = _END.unpack(head + tail)
            if said != records or checksum != zlib.crc32(tail[:-4], zlib.crc32(head, crc)):
                raise self._damaged(f"its checksum or number of records ({records}) is wrong")
            if file.read(1):
                raise self._damaged("something follows its end")

    def _open(self) -> BinaryIO:
        if self.path.exists() and not (self.path.is_file() or self.path.is_dir()):
            raise RoutingFileError(  # read to its end by the first reader, a pipe has none left
                f"the routing {self.path} is no file, and it is read several times; copy it to one"
            )
        try:
            return open(self.path, "rb", buffering=BUFFER_BYTES)
        except OSError as error:
            raise RoutingFileError(
                f"the routing {self.path} cannot be read: {error.strerror or error}"
            ) from error

    def _read_header(self, file: BinaryIO) -> tuple[RoutingHeader, int]:
        first = file.readline(64)
        if not first:
            raise RoutingFileError(
                f"{self.path} is empty; record a routing with 'offload generate --record-routing'"
            )
        if not first.startswith(_MAGIC) or not first.endswith(b"\n"):
            raise RoutingFileError(
                f"{self.path} is not a routing; make one with 'offload generate --record-routing'"
            )
        version = first[len(_MAGIC) : -1].decode("ascii", "replace")
        if version != str(VERSION):
            raise RoutingFileError(
                f"{self.path} is a routing of version {version}, and this offload reads version "
                f"{VERSION}; record it again"
            )
        line = file.readline(_LONGEST_HEADER)
        if not line.endswith(b"\n"):
            raise self._truncated()
        try:
            found = json.loads(line)
            layers = tuple(map(str, found["layers"]))
            experts = tuple(map(int, found["experts"]))
            header = RoutingHeader(layers, experts, str(found["model"]))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise self._damaged("its header cannot be read") from error
        # The writer's bounds: who reads makes lists of all experts.
        sane = layers and len(layers) == len(experts) and len(layers) < _END_LAYER
        if not sane or min(experts) < 1 or max(experts) >= NO_EXPERT:
            raise self._damaged("its header makes no sense")
        return header, zlib.crc32(line, zlib.crc32(first))

    def _exactly(self, file: BinaryIO, n: int) -> bytes:
        # A damaged length is a record of up to 4 TB: memory is asked for what is there alone.
        there = n <= BUFFER_BYTES or n <= os.fstat(file.fileno()).st_size
        data = file.read(n) if there else b""
        if len(data) < n:
            raise self._truncated()
        return data

    def _truncated(self) -> RoutingFileError:
        return RoutingFileError(
            f"the routing {self.path} is truncated at {self.path.stat().st_size} bytes: its end "
            "is missing; copy or record it again"
        )

    def _damaged(self, why: str) -> RoutingFileError:
        return RoutingFileError(f"the routing {self.path} is damaged: {why}; record it again")
