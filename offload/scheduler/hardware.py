"""What a machine can do: measured rates with their spread. Pure data that a probe fills in."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

BYTES_PER_S = "B/s"
FLOP_PER_S = "FLOP/s"

T = TypeVar("T", int, float, str)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Median, lowest and highest of ``n`` samples, in ``unit``.

    Raises:
        ValueError: not positive and finite, or not ``low <= median <= high``.
    """

    median: float
    low: float
    high: float
    n: int
    unit: str

    def __post_init__(self) -> None:
        if not (0 < self.low <= self.median <= self.high < math.inf and self.n >= 1):
            raise ValueError(f"not a rate: {self}")
        if self.unit not in (BYTES_PER_S, FLOP_PER_S):
            raise ValueError(f"not a unit of a rate: {self.unit!r}")

    @classmethod
    def of(cls, samples: Iterable[float], unit: str) -> Rate:
        """The rate that ``samples`` show. Raises ValueError if there are none."""
        values = sorted(samples)
        if not values:
            raise ValueError("a rate needs at least one sample")
        return cls(
            median=statistics.median(values),
            low=values[0],
            high=values[-1],
            n=len(values),
            unit=unit,
        )

    def to_json(self) -> dict[str, object]:
        """As a dict that ``json`` can write."""
        return {
            "median": self.median,
            "low": self.low,
            "high": self.high,
            "n": self.n,
            "unit": self.unit,
        }

    @classmethod
    def from_json(cls, data: object) -> Rate:
        """Inverse of ``to_json``. Raises ValueError that names what is wrong."""
        d = as_object(data, "a rate")
        return cls(
            median=_field(d, "median", float),
            low=_field(d, "low", float),
            high=_field(d, "high", float),
            n=_field(d, "n", int),
            unit=_field(d, "unit", str),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """An accelerator with memory of its own.

    Attributes:
        name: for people.
        memory_bytes: what its memory holds.
        read: a read-only stream of that memory.
        matmul, gemv: as the machine's, computed on the card.
        launch_s: seconds that a product with a matrix takes besides reading it.
    """

    name: str
    memory_bytes: int
    read: Rate
    matmul: Mapping[str, Rate] = field(hash=False)
    gemv: Mapping[str, Rate] = field(hash=False)
    launch_s: float = 0.0

    def __post_init__(self) -> None:
        if self.memory_bytes < 1:
            raise ValueError(f"a card with {self.memory_bytes} bytes of memory is none")
        if not 0 <= self.launch_s < math.inf:
            raise ValueError(f"a launch cannot take {self.launch_s} s")
        _freeze_tables(self)
        _check_units(self)

    def rates(self) -> Iterable[tuple[str, Rate]]:
        """All rates with their names."""
        yield "read", self.read
        yield from _table_rates(self)

    def to_json(self) -> dict[str, object]:
        """As a dict that ``json`` can write."""
        return {
            "name": self.name,
            "memory_bytes": self.memory_bytes,
            "read": self.read.to_json(),
            "matmul": {dtype: rate.to_json() for dtype, rate in self.matmul.items()},
            "gemv": {dtype: rate.to_json() for dtype, rate in self.gemv.items()},
            "launch_s": self.launch_s,
        }

    @classmethod
    def from_json(cls, data: object) -> Card:
        """Inverse of ``to_json``. Raises ValueError that names what is wrong."""
        d = as_object(data, "card")
        return cls(
            name=_field(d, "name", str),
            memory_bytes=_field(d, "memory_bytes", int),
            read=_rate(d, "read"),
            matmul=_rates_by_dtype(d, "matmul"),
            gemv=_rates_by_dtype(d, "gemv"),
            launch_s=_optional(d, "launch_s", 0.0),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One machine and one disk of it.

    Attributes:
        ssd_read, ssd_write: bytes per second, many requests in flight; writes durable.
        ssd_mixed: both directions together, half of the requests each.
        ram_read: a read-only stream over more than the caches hold.
        memcpy: bytes copied per second (each is read once and written once).
        matmul: FLOP per second by torch's name of the dtype.
        gemv: bytes of weights per second of a linear layer at one token, by dtype.
        product_s: seconds that a product with a matrix takes besides reading it (threads that
            meet), more than the smallest one.
        read_beside: share of ``ssd_read`` that is left while the CPU computes.
        gemv_beside: share of ``gemv`` that is left while the disk is read.
        h2d, d2h: copies to and from a device; None without one.
        card: the device, if it has been measured.
        cores: threads the CPU rates were measured with.
        ram_bytes: RAM this process can have at most.
        name: for people: CPU, disk.
    """

    ssd_read: Rate
    ssd_write: Rate
    ssd_mixed: Rate
    ram_read: Rate
    memcpy: Rate
    # Mappings have no hash; the rest identifies the machine well enough for one.
    matmul: Mapping[str, Rate] = field(hash=False)
    gemv: Mapping[str, Rate] = field(hash=False)
    product_s: float = 0.0
    read_beside: float = 1.0
    gemv_beside: float = 1.0
    h2d: Rate | None = None
    d2h: Rate | None = None
    card: Card | None = None
    cores: int
    ram_bytes: int
    name: str

    def __post_init__(self) -> None:
        if self.cores < 1 or self.ram_bytes < 1:
            raise ValueError(f"{self.cores} cores and {self.ram_bytes} bytes of RAM are no machine")
        if not (0 < self.read_beside <= 1 and 0 < self.gemv_beside <= 1):
            raise ValueError(
                f"shares of a rate left beside other work are in (0, 1], got {self.read_beside} "
                f"and {self.gemv_beside}"
            )
        if not 0 <= self.product_s < math.inf:
            raise ValueError(f"a product cannot take {self.product_s} s besides its bytes")
        _freeze_tables(self)
        _check_units(self)

    def rates(self) -> Iterable[tuple[str, Rate]]:
        """All rates of the machine with their names, without the card's own."""
        for name in ("ssd_read", "ssd_write", "ssd_mixed", "ram_read", "memcpy", "h2d", "d2h"):
            rate = getattr(self, name)
            if rate is not None:
                yield name, rate
        yield from _table_rates(self)

    def to_json(self) -> dict[str, object]:
        """As a dict that ``json`` can write."""
        return {
            "ssd_read": self.ssd_read.to_json(),
            "ssd_write": self.ssd_write.to_json(),
            "ssd_mixed": self.ssd_mixed.to_json(),
            "ram_read": self.ram_read.to_json(),
            "memcpy": self.memcpy.to_json(),
            "matmul": {dtype: rate.to_json() for dtype, rate in self.matmul.items()},
            "gemv": {dtype: rate.to_json() for dtype, rate in self.gemv.items()},
            "product_s": self.product_s,
            "read_beside": self.read_beside,
            "gemv_beside": self.gemv_beside,
            "h2d": None if self.h2d is None else self.h2d.to_json(),
            "d2h": None if self.d2h is None else self.d2h.to_json(),
            "card": None if self.card is None else self.card.to_json(),
            "cores": self.cores,
            "ram_bytes": self.ram_bytes,
            "name": self.name,
        }

    @classmethod
    def from_json(cls, data: object) -> Hardware:
        """Inverse of ``to_json``. Raises ValueError that names what is wrong."""
        d = as_object(data, "hardware")
        return cls(
            ssd_read=_rate(d, "ssd_read"),
            ssd_write=_rate(d, "ssd_write"),
            ssd_mixed=_rate(d, "ssd_mixed"),
            ram_read=_rate(d, "ram_read"),
            memcpy=_rate(d, "memcpy"),
            matmul=_rates_by_dtype(d, "matmul"),
            gemv=_rates_by_dtype(d, "gemv"),
            product_s=_optional(d, "product_s", 0.0),
            read_beside=_optional(d, "read_beside", 1.0),
            gemv_beside=_optional(d, "gemv_beside", 1.0),
            h2d=None if d.get("h2d") is None else _rate(d, "h2d"),
            d2h=None if d.get("d2h") is None else _rate(d, "d2h"),
            card=None if d.get("card") is None else Card.from_json(d["card"]),
            cores=_field(d, "cores", int),
            ram_bytes=_field(d, "ram_bytes", int),
            name=_field(d, "name", str),
        )


def _freeze_tables(owner: Card | Hardware) -> None:
    for table in ("matmul", "gemv"):
        rates: Mapping[str, Rate] = getattr(owner, table)
        if not rates:
            raise ValueError(f"{table} has no rate for any dtype")
        object.__setattr__(owner, table, MappingProxyType(dict(rates)))


def _check_units(owner: Card | Hardware) -> None:
    for name, rate in owner.rates():
        unit = FLOP_PER_S if name.startswith("matmul") else BYTES_PER_S
        if rate.unit != unit:
            raise ValueError(f"{name} must be in {unit}, got {rate.unit}")


def _table_rates(owner: Card | Hardware) -> Iterable[tuple[str, Rate]]:
    for table in ("matmul", "gemv"):
        for dtype, rate in getattr(owner, table).items():
            yield f"{table}[{dtype}]", rate


def as_object(data: object, what: str) -> Mapping[str, object]:
    """``data`` of a JSON document, where an object has to be. Raises ValueError: it is none."""
    if not isinstance(data, Mapping):
        raise ValueError(f"{what} must be an object, got {type(data).__name__}")
    return data


def _rate(data: Mapping[str, object], key: str) -> Rate:
    try:
        return Rate.from_json(data.get(key))
    except ValueError as e:
        raise ValueError(f"{key}: {e}") from e


def _rates_by_dtype(data: Mapping[str, object], key: str) -> dict[str, Rate]:
    table = as_object(data.get(key), key)
    return {dtype: _rate(table, dtype) for dtype in table}


def _optional(data: Mapping[str, object], key: str, default: float) -> float:
    return _field(data, key, float) if key in data else default


def _field(data: Mapping[str, object], key: str, kind: type[T]) -> T:
    value = data.get(key)
    # JSON writes 3.0 as it likes, and True is an int to Python.
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return kind(value)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"{key} must be {kind.__name__}, got {value!r}")
    return value
