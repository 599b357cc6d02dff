"""Telling a user that kernels are being compiled: why, how many, how long, and where they go."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from offload.cli.console import err, note, share_progress
from offload.cli.signals import raise_received, signals_wait

if TYPE_CHECKING:  # numba comes with it
    from offload.cpu_ops.warm import Compiling


@contextlib.contextmanager
def compiling_notice(
    why: str = "first use on this machine",
) -> Iterator[Callable[[Compiling], None]]:
    """A report for ``compile_ahead``: a line before, kernel i of n, a line after. All on stderr,
    and nothing at all if nothing has to be compiled.

    A signal waits for the kernel that is being compiled: raised inside, it can hit one of LLVM's
    callbacks, where Python can only print it and go on. A second one ends the process.
    """
    terminal = err().is_terminal
    with contextlib.ExitStack() as bar:
        show: list[Callable[[str, float], None]] = []

        def report(at: Compiling) -> None:
            raise_received()
            if at.done == at.total:
                bar.close()
                note(f"{_kernels(at.total)} in {at.seconds:.1f} s", "compiled")
                return
            if at.done == 0:
                from offload.cpu_ops.isa import choose

                about = f"{why}, about {max(1.0, at.left_s):.0f} s"
                note(f"{_kernels(at.total)} for {choose().value} ({about})", "compiling")
                bar.enter_context(signals_wait())
                if terminal:
                    show.append(bar.enter_context(share_progress("compiling")))
            what = f"kernel {at.done + 1} of {at.total}: {at.next}"
            if show:
                left = f", about {at.left_s:.0f} s left"
                show[0](what + left, at.seconds / max(at.seconds + at.left_s, 1e-9))
            else:
                note(what, "compiling")

        yield report


def _kernels(n: int) -> str:
    return f"{n} CPU kernel{'' if n == 1 else 's'}"
