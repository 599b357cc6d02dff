"""Keep libraries quiet, and offline: before the first import of transformers."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from typing import Any

from offload.cpu_ops.crowding import SPINS
from offload.errors import OffloadError

_OPENMP_WAITS = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
"""What decides how libgomp's threads wait."""

_WITHOUT_DOCSTRINGS = 2
"""The level of optimisation, ``-OO``, from which on Python drops docstrings."""


class _Stderr(logging.Handler):
    """Writes to whatever ``sys.stderr`` is at that moment: a progress bar may have taken it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr)  # noqa: T201
        except (OSError, ValueError):
            self.handleError(record)


def set_up(*, verbose: bool) -> None:
    """Our own log goes to stderr from warnings on (from infos on if ``verbose``); transformers,
    its warnings and progress bars are silent unless ``verbose``.

    Raises:
        OffloadError: they cannot work in a process like this one.
    """
    _check_process()
    _wait_briefly()
    # Nothing is ever downloaded, so a library that asks the hub would only wait for a timeout.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    ours = logging.getLogger("offload")
    for handler in [h for h in ours.handlers if isinstance(h, _Stderr)]:
        ours.removeHandler(handler)
    handler = _Stderr()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    ours.addHandler(handler)
    ours.setLevel(logging.INFO if verbose else logging.WARNING)
    if verbose:
        return
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    warnings.simplefilter("ignore")
    if "transformers" in sys.modules:  # too late for the environment: a process with many commands
        from transformers.utils import logging as theirs

        control: Any = theirs
        control.set_verbosity_error()
        control.disable_progress_bar()


def _wait_briefly() -> None:
    """Have OpenMP's threads wait for each other on their cores for about a millisecond, then sleep.

    torch's runtime (libgomp) reads this when torch is first imported; what the user says of its
    waiting stays. By itself it spins for some 5 ms. A tenth of our number costs a quarter of the
    tokens of an unquantised MoE that has the machine to itself: its threads sleep whenever Python
    takes a moment. Where other programs want the cores, ``cpu_ops.crowding`` sees to it.
    """
    if not _OPENMP_WAITS & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = SPINS


def _check_process() -> None:
    """What libraries end with in ways that say nothing of the reason."""
    if sys.flags.optimize >= _WITHOUT_DOCSTRINGS:
        raise OffloadError(
            "Python drops docstrings (-OO, or PYTHONOPTIMIZE=2), from which transformers makes its "
            "classes; unset it, or use -O"
        )
    try:
        os.getcwd()
    except OSError as error:  # MKL finds nothing from there, and ends the process
        raise OffloadError(
            f"the current directory cannot be used ({error.strerror}), and torch does not compute "
            f"without one; change into another"
        ) from error
