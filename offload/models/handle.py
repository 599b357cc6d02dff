"""``model.offload``: what a user can ask of a streamed model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, SupportsIndex

from offload.blocks import Tier
from offload.errors import OffloadError
from offload.models.attach import Attachment
from offload.models.kernel_error import KernelError
from offload.runtime.executor import WATCHDOG_S, Executor
from offload.runtime.rss import peak_rss
from offload.scheduler.plan import Plan
from offload.scheduler.team import Team

if TYPE_CHECKING:
    from offload.kv.tiers import KvTiers
    from offload.models.lean_run import LeanRun
    from offload.models.prompt_reuse import PromptReuse


@dataclass(kw_only=True)
class OffloadHandle:
    """The runtime behind a streamed model.

    Attributes:
        plan: what lives where, and why.
        load_s: seconds from opening the files to the model being ready.
        baseline_rss: resident bytes of the process before the model (see ``stats``).
        notes: what else a user should know about how the model is run.
        kernel_error: how far fast kernels are from torch's, if they were asked for by name.
    """

    plan: Plan
    executor: Executor
    attachment: Attachment
    load_s: float
    baseline_rss: int
    notes: tuple[str, ...] = ()
    originals: Any = None
    """After ``wrap``: the model's own parameters, waiting for their data."""
    packed: bool = False
    """Whether modules compute on packed bytes, which nothing makes parameters of again."""
    closed: bool = False
    make_cache: Callable[[], Any] | None = None
    end_cache: Callable[[Any], None] | None = None
    kv: KvTiers | None = None
    """The blocks of keys and values, if they are kept so."""
    prompts: PromptReuse | None = None
    """Prefixes of prompts on disk, if there is a prompt cache."""
    kernel_error: KernelError | None = None
    lean: LeanRun | None = None
    """What runs a packed model's tokens through layers without their modules."""
    team: Team | None = None
    """Which number of threads computes a token, where another than torch's may."""

    def new_cache(self) -> Any:
        """An empty KV cache for one sequence, to be given as ``past_key_values`` (``cache``, since
        transformers 5.24); of a packed model the one that its decode kernels read, and where keys
        and values are kept in blocks, one of those: the last one made owns the memory, or as many
        as the model was opened for (``sequences``)."""
        if self.make_cache is not None:
            return self.make_cache()
        from transformers import DynamicCache

        model: Any = self.attachment.model
        return DynamicCache(config=model.config.get_text_config(decoder=True))

    def release_cache(self, cache: Any) -> None:
        """A cache of ``new_cache`` is not needed any more: the next one gets its memory, and no
        other one loses its own."""
        if self.end_cache is not None:
            self.end_cache(cache)

    def stats(self) -> dict[str, Any]:
        """Figures since the model was loaded. Sizes in bytes, times in seconds.

        ``hit_rate`` is None for a model without streamed experts. ``stall_s`` is the time that the
        computing thread waited for data. ``guessed`` experts were read (and then count as misses)
        or copied up to a device before they were routed to, ``guessed_right`` of them then were.
        ``host_waits``: how often it waited for the device, by what for. ``fewer_threads``: whether
        tokens are computed with one thread fewer than torch has, which leaves a core to those that
        read; None: that is not tried. ``cpu_experts``, ``cpu_products``: uses of experts, and of
        dense weights, that the CPU computed beside a device. ``device_peak_bytes``: a card's,
        everything that torch had allocated there; None where its memory is the CPU's. ``kv``: of
        keys and values in blocks or rounded, ``prompt_cache``: of prompts on disk; None without.
        """
        stats = self.executor.stats
        budget = self.plan.budgets.get(Tier.RAM)
        return {
            "load_s": self.load_s,
            "disk_read_bytes": stats.disk_read_bytes,
            "payload_read_bytes": stats.payload_read_bytes,
            "copied_bytes": stats.copied_bytes,
            "h2d_bytes": stats.h2d_bytes,
            "hit_rate": stats.hit_rate,
            "hits": stats.hits,
            "misses": stats.misses,
            "cpu_experts": stats.cpu_experts,
            "cpu_products": stats.cpu_products,
            "guessed": stats.guessed,
            "guessed_right": stats.guessed_right,
            "stall_s": stats.stall_s,
            "fewer_threads": None if self.team is None else self.team.fewer,
            "baseline_rss_bytes": self.baseline_rss,
            "peak_rss_bytes": peak_rss(),
            "ram_budget_bytes": budget,
            "device_peak_bytes": self.executor.device.peak_memory(),
            "device_budget_bytes": self.plan.budgets.get(Tier.DEVICE),
            "host_waits": dict(stats.host_waits),
            "kv": self._kv_stats(),
            "prompt_cache": None if self.prompts is None else self.prompts.prefixes.to_json(),
        }

    def _kv_stats(self) -> dict[str, Any] | None:
        if self.kv is not None:
            return self.kv.stats()
        return None if self.lean is None else self.lean.kv_stats()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """What ``copy.deepcopy`` and ``pickle`` ask for; memory, files and threads have no copy."""
        raise OffloadError(
            "a streamed model cannot be copied or pickled; load it twice, or call "
            "offload.unwrap(model) first if it was wrapped"
        )

    def close(self) -> None:
        """Wait for what is in flight, free memory, files and threads. The model cannot run any
        more; its parameters' memory is gone. Idempotent. From any thread: one that runs the model
        gets a ClosedError.

        Raises:
            StoreError: a recorded routing cannot be written; all the rest is closed.
        """
        if self.closed:
            return
        self.closed = True
        # Another thread that runs the model gets an error at its next unit, and has then gone.
        self.executor.stop()
        with self.attachment.turn.soon(WATCHDOG_S):
            if self.prompts is not None:
                self.prompts.close()
            self.attachment.detach()
            self.attachment.bury()
            self.executor.close()
            if self.kv is not None:
                self.kv.close()
        self.attachment.publish()
