"""The doctor's checks. Each looks at one thing and never raises: a finding is its answer."""

from __future__ import annotations

import enum
import errno
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from offload.errors import OffloadError
from offload.runtime.cgroups import cpu_quota
from offload.runtime.hardware_cache import cache_path, default_threads, disk_name, load_cached
from offload.runtime.rss import available_ram, ram_limit, reset_peak_rss
from offload.units import format_bytes

LEAST_RAM = 2**30
"""Below this only small models run: the libraries alone take some hundred MiB."""


class Verdict(enum.Enum):
    """What a finding means for someone who wants to run a model."""

    GOOD = "good"
    BETTER = "could be better"
    BROKEN = "broken"


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One finding; ``fix`` is a command or an instruction, empty if there is nothing to do."""

    name: str
    verdict: Verdict
    detail: str
    fix: str = ""

    def to_json(self) -> dict[str, str]:
        """As a dict that ``json`` can write."""
        return {
            "name": self.name,
            "verdict": self.verdict.value,
            "detail": self.detail,
            "fix": self.fix,
        }


def run_checks(disk: Path) -> Iterator[Check]:
    """All checks, in the order in which a user would fix things."""
    yield python()
    yield library("torch", "2.9", Verdict.BROKEN)
    yield library("transformers", "5.17", Verdict.BROKEN)
    yield library("numba", "0.61", Verdict.BETTER)
    yield cuda()
    yield cpu_flags()
    yield kernels()
    yield threading_layer()
    yield ram()
    yield huge_pages()
    yield peak_reset()
    yield direct_io(disk)
    yield space(disk)
    yield cache_folder()
    yield probed(disk)
    yield plots()


def python() -> Check:
    """The interpreter."""
    # Older ones than the package allows never come here: its syntax is beyond them.
    detail = f"{platform.python_version()} in {sys.prefix}"
    return Check(name="python", verdict=Verdict.GOOD, detail=detail)


def library(name: str, least: str, missing: Verdict) -> Check:
    """An installed package that imports, at least of a version."""
    fix = f"pip install '{name}>={least}'"
    try:
        importlib.import_module(name)
        version = importlib.metadata.version(name)
    except Exception as error:  # noqa: BLE001  a broken install fails in any way it likes
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return Check(name=name, verdict=missing, detail=f"cannot be imported ({first})", fix=fix)
    if _numbers(version) < _numbers(least):
        return Check(name=name, verdict=missing, detail=f"{version} is older than {least}", fix=fix)
    return Check(name=name, verdict=Verdict.GOOD, detail=version)


def _numbers(version: str) -> tuple[int, ...]:
    head = version.partition("+")[0].split(".")
    return tuple(int("".join(c for c in part if c.isdigit()) or 0) for part in head[:3])


def cuda() -> Check:
    """Whether there is a card, which computes where a budget for it is given."""
    try:
        torch = importlib.import_module("torch")
        card = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    except Exception as error:  # noqa: BLE001  drivers fail in their own ways
        card, why = None, f" ({error})"
    else:
        why = ""
    cupy = importlib.util.find_spec("cupy") is not None
    detail = (
        f"{card}: computes with --gpu SIZE" if card else f"no usable card{why}; the CPU computes"
    )
    return Check(
        name="CUDA",
        verdict=Verdict.GOOD if card else Verdict.BETTER,
        detail=f"{detail} (cupy is {'' if cupy else 'not '}installed and not needed)",
        fix=""
        if card
        else "nothing to do; --device sim --gpu SIZE shows how a card's memory would be used",
    )


def cpu_flags() -> Check:
    """Instructions that decide how fast the CPU multiplies, and in which dtypes."""
    wanted = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16")
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return Check(
            name="CPU", verdict=Verdict.BETTER, detail=f"{platform.machine()}, flags unknown"
        )
    flags = next((set(line.split()) for line in lines if line.startswith("flags")), set())
    have = [flag for flag in wanted if flag in flags]
    listed = ", ".join(have) or "none of " + ", ".join(wanted)
    listed += f"; {_count(default_threads(), 'thread')}"
    if (quota := cpu_quota()) is not None:
        listed += f", for a CPU quota of {quota:.3g}"
    if slow := _slow_bfloat16():
        return Check(
            name="CPU",
            verdict=Verdict.BETTER,
            detail=f"{listed}; {slow}: training and long prompts take many times as long in it",
            fix="give --dtype float32 (twice the bytes), or for prompts --quant q8",
        )
    if {"avx512_bf16", "amx_bf16"} & flags or (not flags and platform.machine() == "aarch64"):
        return Check(name="CPU", verdict=Verdict.GOOD, detail=listed)
    return Check(
        name="CPU",
        verdict=Verdict.BETTER,
        detail=f"{listed}; no bfloat16 instructions, long prompts are slower in it",
        fix="compare with --dtype float32 (twice the bytes)",
    )


def _slow_bfloat16() -> str | None:
    try:
        import torch

        from offload.runtime.slow_products import slowness
    except ImportError:  # which the check of the libraries reports
        return None
    return slowness(torch.bfloat16)


def kernels() -> Check:
    """How many CPU kernels are compiled for this machine, and where."""
    name, fix = "kernels", "offload doctor --warm"
    try:
        from offload.cli.warming import take_stock
        from offload.cpu_ops.kernel_cache import VARIABLE

        found = take_stock()
    except OffloadError as error:
        return Check(name=name, verdict=Verdict.BROKEN, detail=str(error), fix="unset OFFLOAD_ISA")
    except Exception as error:  # noqa: BLE001  without a whole numba anything can be missing
        detail = f"cannot be compiled ({error}); only models that are not packed run"
        return Check(name=name, verdict=Verdict.BETTER, detail=detail, fix="pip install numba")
    if found.directory is None or not found.as_asked:
        kept = f"they go to {found.directory}" if found.directory else "every start compiles them"
        return Check(
            name=name,
            verdict=Verdict.BETTER,
            detail=f"the directory for compiled kernels cannot be written: {kept}",
            fix=f"export {VARIABLE}=DIR with a directory that can be written",
        )
    if found.compiled == found.total:
        detail = f"all {found.total} for {found.isa} are compiled, in {found.place}"
        return Check(name=name, verdict=Verdict.GOOD, detail=detail)
    return Check(
        name=name,
        verdict=Verdict.BETTER,
        detail=f"{found.compiled} of {found.total} for {found.isa} are compiled, in "
        f"{found.place}; a model's missing ones are compiled before its first token",
        fix=f"{fix}  (about {max(1, round(found.todo_s / 60))} min, once)",
    )


def threading_layer() -> Check:
    """Which threads the kernels run on, and what Numba's setting for its own means."""
    name, variable = "kernel threads", "NUMBA_THREADING_LAYER"
    try:
        from offload.cpu_ops.threads import openmp

        shared = openmp() is not None
    except Exception as error:  # noqa: BLE001  torch or numba may be anything but whole
        return Check(name=name, verdict=Verdict.BETTER, detail=f"cannot be tried ({error})")
    detail = "torch's own OpenMP pool" if shared else "1: torch has no OpenMP pool to share"
    if os.environ.get(variable, "").strip().lower() == "workqueue":
        return Check(
            name=name,
            verdict=Verdict.BETTER,
            detail=f"{detail}; {variable}=workqueue does not concern them, as no kernel here uses "
            "Numba's threads, but other Numba code in the same process: that layer is not "
            "thread-safe, and Numba ends a process whose threads enter it at once",
            fix=f"unset {variable}, or set it to omp or tbb",
        )
    if not shared:
        return Check(
            name=name,
            verdict=Verdict.BETTER,
            detail=f"{detail} (Numba's own are not used)",
            fix="pip install torch from pytorch.org, which has one on Linux",
        )
    others = "Numba's own are not used"
    if _numba_layers() == {"workqueue"}:
        others += ", of which only workqueue is here: not thread-safe"
    return Check(name=name, verdict=Verdict.GOOD, detail=f"{detail}; {others}")


def _numba_layers() -> set[str]:
    """The threading layers that Numba could start here."""
    found = set()
    for layer, module in (("tbb", "tbbpool"), ("omp", "omppool"), ("workqueue", "workqueue")):
        try:
            importlib.import_module(f"numba.np.ufunc.{module}")
        except ImportError:
            continue
        found.add(layer)
    return found


def _count(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def ram() -> Check:
    """What a model could take now, container limits counted."""
    free, limit = available_ram(), ram_limit()
    detail = f"{format_bytes(free)} free of {format_bytes(limit)}"
    if limit < _machine_ram():
        detail += f" (this container's limit; the machine has {format_bytes(_machine_ram())})"
    if free >= LEAST_RAM:
        return Check(name="RAM", verdict=Verdict.GOOD, detail=detail)
    return Check(
        name="RAM",
        verdict=Verdict.BETTER,
        detail=f"{detail}: only small models will run",
        fix="stop other programs, or raise the container's memory limit",
    )


def _machine_ram() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def huge_pages() -> Check:
    """Transparent huge pages for the arenas."""
    name, file = "huge pages", Path("/sys/kernel/mm/transparent_hugepage/enabled")
    try:
        text = file.read_text(encoding="utf-8")
    except OSError:
        return Check(name=name, verdict=Verdict.BETTER, detail="this system has none to ask for")
    mode = text.partition("[")[2].partition("]")[0]
    if mode in ("always", "madvise"):
        return Check(name=name, verdict=Verdict.GOOD, detail=mode)
    return Check(
        name=name,
        verdict=Verdict.BETTER,
        detail=f"switched off ({mode or 'unknown'})",
        fix=f"echo madvise | sudo tee {file}",
    )


def peak_reset() -> Check:
    """Whether the peak of memory can be measured from the load on."""
    if reset_peak_rss():
        return Check(name="peak memory", verdict=Verdict.GOOD, detail="can be measured exactly")
    return Check(
        name="peak memory",
        verdict=Verdict.BETTER,
        detail="/proc/self/clear_refs is not writable: reported peaks count from the start of the "
        "process and may be too high",
        fix="run on Linux with a writable /proc",
    )


def direct_io(disk: Path) -> Check:
    """Reads past the page cache, and the disk under them."""
    name = "disk"
    flag = getattr(os, "O_DIRECT", 0)
    try:
        with tempfile.NamedTemporaryFile(prefix=".offload-doctor-", dir=disk) as probe:
            probe.write(bytes(4096))
            probe.flush()
            try:
                os.close(os.open(probe.name, os.O_RDONLY | flag))
                direct = bool(flag)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                direct = False
    except OSError as error:
        return Check(
            name=name,
            # Models can be read from there all the same.
            verdict=Verdict.BETTER if disk.is_dir() else Verdict.BROKEN,
            detail=f"{disk} cannot be tried and measured: {error.strerror}",
            fix="give another directory: offload doctor --disk DIR",
        )
    where = f"{disk.resolve()} ({disk_name(disk)})"
    if direct:
        return Check(name=name, verdict=Verdict.GOOD, detail=f"{where} has O_DIRECT")
    return Check(
        name=name,
        verdict=Verdict.BETTER,
        detail=f"{where} has no O_DIRECT: reads go through the page cache, which costs memory",
        fix="keep models on a local file system such as ext4 or xfs",
    )


def space(disk: Path) -> Check:
    """Room on the disk; only converted weights and wrapped models need any."""
    try:
        stat = os.statvfs(disk)
    except OSError as error:
        return Check(
            name="disk space",
            verdict=Verdict.BROKEN,
            detail=f"{disk}: {error.strerror}",
            fix="give another directory: offload doctor --disk DIR",
        )
    free = stat.f_bavail * stat.f_frsize
    if free >= LEAST_RAM:
        return Check(name="disk space", verdict=Verdict.GOOD, detail=f"{format_bytes(free)} free")
    return Check(
        name="disk space",
        verdict=Verdict.BETTER,
        detail=f"{format_bytes(free)} free",
        fix="free some space, or give --disk on another disk if weights have to be converted",
    )


def cache_folder() -> Check:
    """Where measurements, and private files by default, are kept."""
    name, fix = "cache", "export XDG_CACHE_HOME=DIR"
    try:
        folder = cache_path().parent
    except OffloadError as error:
        return Check(name=name, verdict=Verdict.BETTER, detail=f"{error}", fix=fix)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return Check(name=name, verdict=Verdict.GOOD, detail=f"{folder} is writable")
    except OSError as error:
        return Check(
            name=name,
            verdict=Verdict.BETTER,
            detail=f"{folder} is not writable ({error.strerror}): nothing measured is kept",
            fix=fix,
        )


def probed(disk: Path) -> Check:
    """Whether predictions stand on measurements of this disk."""
    try:
        found = load_cached(disk)
    except (OSError, OffloadError, importlib.metadata.PackageNotFoundError):
        found = None
    if found is None:
        return Check(
            name="probe",
            verdict=Verdict.BETTER,
            detail="this disk and CPU have not been measured: the first plan does it quickly",
            fix=f"offload probe --disk {disk}",
        )
    return Check(
        name="probe",
        verdict=Verdict.GOOD,
        detail=f"disk reads {found.ssd_read.median / 1e9:.3g} GB/s, RAM reads "
        f"{found.ram_read.median / 1e9:.3g} GB/s",
    )


def plots() -> Check:
    """The benchmarks' plots."""
    if importlib.util.find_spec("matplotlib") is not None:
        version = importlib.metadata.version("matplotlib")
        return Check(name="matplotlib", verdict=Verdict.GOOD, detail=f"{version}, for plots")
    return Check(
        name="matplotlib",
        verdict=Verdict.BETTER,
        detail="not installed; only the benchmarks' plots need it",
        fix="pip install 'offload[plot]'",
    )
