"""``python -m offload`` is the command line, and so is the ``offload`` command.

Nothing of ours is imported here before ``run``: what is imported is what takes the time until a
command begins.
"""

import signal
import sys


def run() -> int:
    """Run the command of ``sys.argv``; returns the exit code."""
    # Until the command answers signals itself: Python's way is a traceback through our imports.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from offload.cli.imports import importing

    importing()
    from offload.cli.main import main

    return main()


if __name__ == "__main__":
    sys.exit(run())
