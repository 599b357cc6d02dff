"""Which instructions the kernels use on this machine.

Three sets, each with the same results to the bit for every integer format: what differs is the
instruction that multiplies four bytes by four bytes, the table look-up and the float16 conversion.
Everything else is LLVM's generic vector code, lowered to whatever the processor has.
"""

from __future__ import annotations

import enum
import functools
import os

from offload.errors import OffloadError

VARIABLE = "OFFLOAD_ISA"
"""Environment variable that forces a set."""


class Isa(enum.Enum):
    """Instruction sets, best first."""

    AVX512VNNI = "avx512vnni"
    AVX2 = "avx2"
    PORTABLE = "portable"
    """Generic code: NEON, SVE, SSE2, anything LLVM compiles for."""


NEEDS: dict[Isa, tuple[str, ...]] = {
    Isa.AVX512VNNI: ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni", "f16c", "fma"),
    Isa.AVX2: ("avx2", "f16c", "fma"),
    Isa.PORTABLE: (),
}


@functools.cache
def features() -> frozenset[str]:
    """Flags that the processor and system have *and* that Numba compiles for.

    The two differ if NUMBA_CPU_NAME or NUMBA_CPU_FEATURES is set: an intrinsic the compiler does
    not know of makes LLVM abort the process, one the processor lacks is a SIGILL.
    """
    import llvmlite.binding as llvm
    from numba.core.registry import cpu_target

    try:
        host = {name for name, has in llvm.get_host_cpu_features().items() if has}
    except RuntimeError:  # LLVM cannot tell on some systems: portable code needs no flag
        return frozenset()
    _, _, compiled = cpu_target.target_context.codegen().magic_tuple()
    return frozenset(host & {f[1:] for f in compiled.split(",") if f.startswith("+")})


def choose(name: str | None = None) -> Isa:
    """The set to use: ``name``, else the environment's OFFLOAD_ISA, else the best supported.

    Raises:
        OffloadError: the name is unknown, or this machine cannot run it.
    """
    asked = name or os.environ.get(VARIABLE) or None
    return best(features()) if asked is None else _forced(asked, features())


@functools.cache
def best(has: frozenset[str]) -> Isa:
    """The best set for a processor with these flags."""
    return next(isa for isa in Isa if has.issuperset(NEEDS[isa]))


@functools.cache
def _forced(name: str, has: frozenset[str]) -> Isa:
    try:
        isa = Isa(name.lower())
    except ValueError:
        known = ", ".join(i.value for i in Isa)
        raise OffloadError(f"{VARIABLE}={name!r} is no instruction set; use {known}") from None
    missing = sorted(set(NEEDS[isa]) - has)
    if missing:
        raise OffloadError(
            f"{VARIABLE}={isa.value} needs {', '.join(missing)}, which this processor or Numba's "
            f"settings do not have; unset it to use {best(has).value}"
        )
    return isa
