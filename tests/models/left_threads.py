"""Which threads a test leaves behind. Everything of ours is joined by who closes it, and must be
gone at once; ``from_pretrained`` tells the threads of its pool to end and does not wait for them.
"""

from __future__ import annotations

import threading
from collections.abc import Collection


def threads_left(before: Collection[threading.Thread]) -> list[str]:
    """Names of the threads alive that were not there ``before``; a minute for others' to end."""
    new = [thread for thread in threading.enumerate() if thread not in before]
    for thread in new:
        if not thread.name.startswith("offload-"):
            thread.join(timeout=60)
    return [thread.name for thread in new if thread.is_alive()]
