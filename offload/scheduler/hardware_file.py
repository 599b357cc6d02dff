"""A machine in a file: what ``offload probe --json`` writes and ``--hardware`` reads.

Strict where the cache of probes is lenient: a file that a person has written or carried from
another machine must not lose a misspelt field in silence. Beside the fields of ``Hardware`` there
may be a ``comment`` (text, or a list of it) in the document, in the card and in every rate: where
a figure comes from.
"""

from __future__ import annotations

import reprlib
import sys
from collections.abc import Collection, Mapping

from offload.errors import OffloadError
from offload.scheduler.hardware import BYTES_PER_S, FLOP_PER_S, Hardware, as_object

VERSION = 1

_RATES = ("ssd_read", "ssd_write", "ssd_mixed", "ram_read", "memcpy")
_MAYBE_RATES = ("h2d", "d2h")
_TABLES = ("matmul", "gemv")
_WHOLE = ("cores", "ram_bytes")
_NUMBERS = ("product_s", "read_beside", "gemv_beside")
_CARD = ("name", "memory_bytes", "read", *_TABLES)


def document(hardware: Hardware) -> dict[str, object]:
    """What a hardware file holds."""
    return {"version": VERSION, **hardware.to_json()}


def parse(data: object, where: str) -> Hardware:
    """The machine that a document describes.

    Args:
        where: what to call the file in messages.

    Raises:
        OffloadError: another version, an unknown or a missing field, a rate that is none; names
            the field.
    """
    try:
        d = as_object(data, "the document")
        version = d.get("version")
        if version != VERSION or isinstance(version, bool):
            raise ValueError(f"version is {version!r}, and this program reads {VERSION}")
        _check_fields(
            d,
            "",
            need=(*_RATES, *_TABLES, *_WHOLE, "name"),
            may=(*_MAYBE_RATES, *_NUMBERS, "card", "version"),
        )
        for name in (*_RATES, *_MAYBE_RATES):
            if name in _RATES or d.get(name) is not None:
                _check_rate(d[name], name, BYTES_PER_S)
        for name in _WHOLE:
            _check_size(d[name], name)
        _check_tables(d, "")
        if d.get("card") is not None:
            card = as_object(d["card"], "card")
            _check_fields(card, "card.", need=_CARD, may=("launch_s",))
            _check_rate(card["read"], "card.read", BYTES_PER_S)
            _check_tables(card, "card.")
            _check_size(card["memory_bytes"], "card.memory_bytes")
            if d.get("h2d") is None or d.get("d2h") is None:
                raise ValueError("h2d and d2h are missing: a card is reached by copies")
        return Hardware.from_json({k: v for k, v in d.items() if k != "version"})
    except (ValueError, OverflowError) as error:
        raise OffloadError(
            f"{where} is no hardware file: {error}; 'offload probe --json FILE' writes one"
        ) from error


def _check_fields(
    data: Mapping[str, object], prefix: str, *, need: Collection[str], may: Collection[str]
) -> None:
    known = {*need, *may, "comment"}
    for name in data:
        if name not in known:
            raise ValueError(f"unknown field {prefix}{name}")
    for name in need:
        if name not in data:
            raise ValueError(f"the field {prefix}{name} is missing")


def _check_tables(data: Mapping[str, object], prefix: str) -> None:
    for name, unit in zip(_TABLES, (FLOP_PER_S, BYTES_PER_S), strict=True):
        table = as_object(data[name], f"{prefix}{name}")
        if not table:
            raise ValueError(f"{prefix}{name} has no rate for any dtype")
        for dtype, rate in table.items():
            _check_rate(rate, f"{prefix}{name}.{dtype}", unit)


def _check_rate(data: object, name: str, unit: str) -> None:
    rate = as_object(data, name)
    _check_fields(rate, f"{name}.", need=("median", "low", "high", "n", "unit"), may=())
    for key in ("low", "median", "high"):
        value = rate[key]
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError(f"{name}.{key} must be a number, got {reprlib.repr(value)}")
        if not 0 < value <= sys.float_info.max:
            raise ValueError(f"{name}.{key} must be positive, got {reprlib.repr(value)}")
    if rate["unit"] != unit:
        raise ValueError(f"{name}.unit must be {unit}, got {rate['unit']!r}")


def _check_size(value: object, name: str) -> None:
    if isinstance(value, int) and abs(value) >= 2**63:
        raise ValueError(f"{name} must be below 2**63, got {reprlib.repr(value)}")
