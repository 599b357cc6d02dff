"""What a user asks of a streamed model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offload.errors import OffloadError
from offload.io.engines import DEFAULT_QUEUE_DEPTH, DEFAULT_REQUEST_BYTES
from offload.kv.keep import AttentionMass, Importance, Keep, block_tokens_to_keep
from offload.kv.shape import BLOCK_TOKENS
from offload.models.option_types import check_types
from offload.runtime.choice import Choice, choose
from offload.runtime.rss import available_ram
from offload.runtime.timeline import Recorder
from offload.scheduler.hardware import Hardware
from offload.scheduler.policy import NAMES
from offload.units import format_bytes, parse_bytes

DEFAULT_CONTEXT = 1024
"""Tokens of prompt and answer together that memory is set aside for, unless said otherwise."""

SAFE_SHARE = 0.8
"""Of the memory that is free, what a model takes when no budget is given."""

SLACK_SHARE, LEAST_SLACK, MOST_SLACK = 64, 512 * 2**10, 16 * 2**20
"""Set aside for what no plan can count (allocator fragments, thread stacks, Python objects): one
part in 64 of the budget, within these bytes."""

BESIDE_BYTES, SEQUENCE_BYTES = 2**20, 224 * 2**10
"""What running several sequences takes, and each of them: a greenlet's stacks, its settings and its
text, and 64 KiB for rows that are multiplied together (``offload.batch.joined``)."""

ROW_SHARE = 0.2
"""Of what a layer takes besides its products, what each row more takes where layers are computed
for all sequences at once: its attention, and what is done row by row. An estimate."""

COUNTS = ("context", "batch", "sequences", "prompt_tokens", "queue_depth", "request_bytes",
          "kv_block_tokens", "prompt_cache_chunk")  # fmt: skip
"""Options that count something there has to be at least one of."""

Progress = Callable[[str, int, int], None]
"""``progress(what, done_bytes, total_bytes)``."""


@dataclass(kw_only=True)
class Options:
    """What the user asked for; sizes in bytes."""

    ram: int | None = None
    gpu: int | None = None
    disk: str | Path | None = None
    dtype: str | torch.dtype | None = None
    device: str = "auto"
    prompt_tokens: int | None = None
    context: int = DEFAULT_CONTEXT
    batch: int = 1
    sequences: int = 1
    """Generations that run beside each other, each with a cache of its own (``offload.batch``)."""
    pass_rows: int | None = None
    """Tokens of several sequences' prompts that one pass over the model reads at most, and so keeps
    activations of; one prompt always goes. None: one prompt."""
    engine: str | None = None
    queue_depth: int = DEFAULT_QUEUE_DEPTH
    request_bytes: int = DEFAULT_REQUEST_BYTES
    hardware: Hardware | None = None
    fewer: Hardware | None = None
    """The rates with one thread fewer, to plan with the faster of the two; None: not measured."""
    elsewhere: bool = False
    """Whether ``hardware`` is another machine, and nothing will run here: its card, if the plan has
    three tiers, is what computes."""
    sample: Callable[[Hardware, Any], tuple[Hardware, Hardware | None]] | None = None
    """What makes of ``hardware`` the rates of this moment for a pack (a ``PackedModel``), with
    torch's threads and with one fewer; called as soon as its kernels are compiled."""
    hybrid: bool | None = None
    """Whether the CPU computes a part: experts while the device computes others, and at decode with
    dense weights that stay in RAM because moving them would cost more. None: no."""
    guess: bool = True
    """Whether experts may be read on a guess into disk time that nothing else can use; without,
    only experts that were routed to are ever read. The results are the same."""
    guess_precision: float | None = None
    """The share of guesses that were right when the model ran before, 0 to 1, for the prediction;
    None: not known."""
    expert_policy: str | None = None
    """What decides which expert leaves memory for another: a name of ``offload.scheduler.policy``;
    None: the default. The results are the same."""
    routing: str | Path | None = None
    """For the policy ``pinned``: a recorded routing, whose most used experts stay."""
    record_routing: str | Path | None = None
    """A file to record into what every layer routes to, published when the model is closed."""
    recorder: Recorder | None = None
    """Of what the lanes do when; its ring counts as ``tokenizer_bytes`` do."""
    kernels: str | None = None
    """``"exact"``: torch's; ``"fast"``: ours, on a pack, and the error of unquantised weights is
    measured when it is opened. None: a pack's are ours, a checkpoint's torch's."""
    attention: str | None = None
    """``"exact"``: the model's own; ``"offload"``: our kernels over keys and values in blocks, with
    other rounding. None: the model's own, or ours with fast kernels and blocks."""
    kv_ram: int | None = None
    """Bytes of RAM for keys and values in blocks; what does not fit streams from the disk. None:
    all are in RAM, or as many as fit beside the least that weights need."""
    kv: str | None = None
    """``"q8"``, ``"q4"``: keys and values in so many bits, as soon as a block of them is full;
    ``"bf16"``: in bfloat16. Lossy, and attended to in place. None: as the model computes them."""
    kv_spill: bool = False
    """Whether keys and values of ``sequences`` may be on the disk in a part where one's would not
    be: set by who plans, when not all fit."""
    kv_keep: int | None = None
    """Tokens of each layer that stay: the first, the newest, and of the others the blocks that
    attention went to. Lossy, and attended to in place. None: all."""
    kv_importance: Callable[[], Importance] = AttentionMass
    """What scores blocks for ``kv_keep``; called for each layer of each cache."""
    kv_block_tokens: int | None = None
    """Of a block; None: by the context, larger ones where it is long."""
    prompt_cache: str | Path | None = None
    """A directory for keys and values of prompts, so that what was read once is not read again."""
    prompt_cache_limit: int = 8 * 2**30
    """Bytes of all that is in it."""
    prompt_cache_chunk: int = BLOCK_TOKENS
    """Tokens of a pass over a prompt where there is a prompt cache; hits end on this grid, and
    where blocks in 8 or 4 bits do."""
    in_pieces: bool = False
    """Whether the caller will ask if prompts may be read in pieces (``pieces.why_not_in_pieces``):
    a prompt cache and ``kv_keep`` do in any case."""
    seed: int | None = None
    overhead_bytes: int | None = None
    """Set aside for the model's Python objects and for slack; None: measured."""
    tokenizer_bytes: int = 0
    """What this process already holds for the caller and the budget has to cover."""
    caller_bytes: int = 0
    """What the caller will take besides while the model runs."""

    @property
    def beside_bytes(self) -> int:
        """Of sequences besides what their model caches and computes (Python's and C's stacks), and
        of the caller."""
        if self.pass_rows is None:
            return self.caller_bytes
        return self.caller_bytes + BESIDE_BYTES + self.sequences * SEQUENCE_BYTES

    def parked_rows(self, prompt: int) -> int:
        """Tokens whose activations wait while another sequence runs."""
        if self.sequences == 1:
            return 0
        most = max(prompt, self.pass_rows or 0)
        return min(most, (self.sequences - 1) * prompt) + self.sequences

    @property
    def choice(self) -> Choice:
        """The device that is meant. Raises OffloadError if it cannot be."""
        return choose(self.device, self.gpu)

    def __post_init__(self) -> None:
        check_device(self)
        check_policy(self)
        if self.kv_ram is not None and self.ram is not None and self.kv_ram > self.ram:
            raise OffloadError(
                f"--kv-ram is a part of --ram, and its {format_bytes(self.kv_ram)} are more than "
                f"the {format_bytes(self.ram)} of all; lower it or raise --ram"
            )
        if self.attention not in (None, "exact", "offload"):
            raise OffloadError(f"attention {self.attention!r} is not one of exact, offload")
        if self.kv not in (None, "bf16", "q8", "q4"):
            raise OffloadError(f"KV {self.kv!r} is not one of bf16, q8, q4")
        if self.kv is not None and self.attention == "exact":
            raise OffloadError(
                f"--kv {self.kv} needs attention that reads such blocks; drop --attention exact"
            )
        if self.kv_keep is not None:
            self._check_keep(self.kv_keep)
        asked = self.attention == "offload" or self.kv is not None or self.kv_keep is not None
        if asked and self.choice.kind != "cpu":
            raise OffloadError(
                "--attention offload, --kv and --kv-keep compute on the CPU; drop them, or --gpu "
                "and --device"
            )
        if self.hybrid and self.choice.kind == "cpu":
            raise OffloadError(
                "--hybrid shares the work between a card and the CPU, and here the CPU has all; "
                "add --gpu SIZE or drop it"
            )
        if self.kernels not in (None, "exact", "fast"):
            raise OffloadError(f"kernels {self.kernels!r} is not one of exact, fast")

    def _check_keep(self, tokens: int) -> None:
        block_tokens_to_keep(tokens, self.kv_block_tokens)
        if self.attention == "exact":
            raise OffloadError(
                "--kv-keep needs attention that tells what it went to; drop --attention exact"
            )
        if self.prompt_cache is not None:
            raise OffloadError(
                "--prompt-cache keeps all keys and values of a prompt, and --kv-keep some of them; "
                "drop one of the two"
            )

    @property
    def keep(self) -> Keep | None:
        """What stays of keys and values; None: all."""
        if self.kv_keep is None:
            return None
        size = block_tokens_to_keep(self.kv_keep, self.kv_block_tokens)
        return Keep(tokens=self.kv_keep, block_tokens=size, importance=self.kv_importance)


def check_policy(options: Options) -> None:
    """Raises OffloadError: an unknown policy, or one that lacks its routing."""
    name = options.expert_policy
    if name is not None and name not in NAMES:
        raise OffloadError(f"expert policy {name!r} is not one of {', '.join(NAMES)}")
    if name == "pinned" and options.routing is None:
        raise OffloadError(
            "the expert policy pinned keeps the experts that a recorded routing used most: record "
            "one with --record-routing FILE, then give it with --routing FILE"
        )
    if name != "pinned" and options.routing is not None:
        raise OffloadError(
            f"a routing ({options.routing}) is only for the expert policy pinned; drop --routing "
            "or add --expert-policy pinned"
        )


def check_device(options: Options) -> str:
    """``cpu``, ``sim`` or ``cuda``. Raises OffloadError: the device or its budget cannot be."""
    return options.choice.kind


def parse_options(
    *,
    ram: str | int | None = None,
    gpu: str | int | None = None,
    kv_ram: str | int | None = None,
    prompt_cache_limit: str | int | None = None,
    **others: Any,
) -> Options:
    """Options from sizes as people write them.

    Raises:
        OffloadError: a size that is none, an option that is unknown, of another type or without
            effect beside the others, no token or no sequence.
    """
    unknown = sorted(others.keys() - Options.__dataclass_fields__.keys())
    if unknown:
        known = ", ".join(sorted(Options.__dataclass_fields__))
        raise OffloadError(f"{unknown[0]} is no option; known are {known}")
    if isinstance(others.get("device"), torch.device):
        others["device"] = str(others["device"])
    others = check_types(Options, others)
    for name in COUNTS:
        if (value := others.get(name)) is not None and value < 1:
            raise OffloadError(f"{name} is {value}; give 1 or more")
    if prompt_cache_limit is not None:
        others["prompt_cache_limit"] = parse_bytes(prompt_cache_limit)
    for name in ("prompt_cache_limit", "prompt_cache_chunk"):
        if name in others and others.get("prompt_cache") is None:
            raise OffloadError(f"{name} needs a prompt cache; give prompt_cache=DIR or drop it")
    return Options(
        ram=None if ram is None else parse_bytes(ram),
        gpu=None if gpu is None else parse_bytes(gpu),
        kv_ram=None if kv_ram is None else parse_bytes(kv_ram),
        **others,
    )


def safe_share(ram: int | None) -> list[str]:
    """A note where no budget is given: what is taken then."""
    if ram is not None:
        return []
    return [
        f"no --ram given: {SAFE_SHARE:.0%} of the {format_bytes(available_ram())} that are free"
    ]


def beyond_free(nbytes: int) -> list[str]:
    """A note where a plan takes more RAM than is free: a budget is the user's word, and what a
    system does when it is wrong (its own limit, or that of a container) is to end the process."""
    free = available_ram()
    if nbytes <= free:
        return []
    return [
        f"{format_bytes(nbytes)} of RAM are planned and {format_bytes(free)} are free: the system "
        f"may end this process, or swap; give --ram {format_bytes(int(free * SAFE_SHARE))} or free "
        f"some"
    ]
