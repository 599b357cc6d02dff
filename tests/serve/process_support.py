"""``offload serve`` as a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
from serve_support import TINY, WAIT_S

CONTEXT = 1024


class Server:
    """A running server; ends with the ``with`` whatever happens."""

    def __init__(self, *words: object, cache: Path, key: str | None = None) -> None:
        command = ("serve", "-m", TINY, "--port", 0, "--no-predict", "-c", CONTEXT, *words)
        self.process = subprocess.Popen(
            [sys.executable, "-m", "offload", *map(str, command)],
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(cache)},
        )
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self.said: list[str] = []
        self.url = ""
        self._listening = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()
        if not self._listening.wait(2 * WAIT_S) or not self.url:
            self._kill()
            raise AssertionError("it does not listen:\n" + "\n".join(self.said))

    def __enter__(self) -> Server:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._kill()

    def stats(self) -> dict[str, Any]:
        response = httpx.get(f"{self.url}/stats", headers=self._headers, timeout=WAIT_S)
        found: dict[str, Any] = response.raise_for_status().json()
        return found

    def until(self, what: str, count: int) -> None:
        """Until ``stats`` says so of the requests."""
        pause = threading.Event()
        for _ in range(2000):
            if self.stats()["requests"][what] == count:
                return
            pause.wait(0.1)
        raise AssertionError(f"{what} is not {count}: {self.stats()}")

    def _read(self) -> None:
        stderr = self.process.stderr
        if stderr is None:
            raise AssertionError("it is a pipe")
        for line in stderr:
            self.said.append(line.rstrip("\n"))
            if line.startswith("listening on: "):
                self.url = line.removeprefix("listening on: ").strip()
                self._listening.set()
        self._listening.set()

    def _kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join()
        if self.process.stderr is not None:
            self.process.stderr.close()
