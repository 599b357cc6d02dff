"""What a fine-tuning run is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

METHODS = ("full", "lora")
STATES = ("fp32", "bf16", "8bit")
SCHEDULES = ("linear", "cosine", "constant")
KEEPS = ("best", "last", "both")


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOptions:
    """The flags of ``offload finetune``; sizes in bytes. ``checks.check_options`` judges them."""

    model: str
    data: Path
    output: Path
    eval_data: Path | None = None
    method: str = "full"
    """"full" or "lora"."""
    ram: int | None = None
    """None: a safe share of what is free."""
    gpu: int | None = None
    """Of the device that layers run on; None: of a card most of what is free
    there, of a simulated one as much as ``ram``."""
    device: str = "auto"
    """A name of ``runtime.choice``; "auto" is the CPU unless ``gpu`` is set, then the card."""
    head: str = "auto"
    """Where the LM head and the loss are computed if layers run on a device: there ("gpu"), in RAM
    ("cpu"), or where a step is predicted to be faster ("auto")."""
    gpu_updates: str = "auto"
    """Of how many tiles of optimizer states the device updates one, as digits; "off": none; "auto":
    with which a step is predicted to be fastest."""
    disk: Path | None = None
    """Where states and gradients live; None: ``OUTPUT.offload`` beside the output."""
    states: str = "fp32"
    """"fp32" (masters and moments), "bf16" (stochastic rounding) or "8bit" (moments)."""
    grad_dtype: str | None = None
    """"bf16" or "fp32"; None: fp32 if accumulating, else the compute dtype."""
    dtype: str | None = None
    """Compute dtype; None: the checkpoint's."""
    max_steps: int | None = None
    epochs: float = 1.0
    """Ends the run unless ``max_steps`` does."""
    batch_size: int = 1
    """Sequences of a micro-batch."""
    grad_accum: int = 1
    """Micro-batches of a step."""
    order: str = "vertical"
    """Micro-batches "vertical" (all of them layer by layer) or "usual" (one after the other)."""
    seq_len: int = 1024
    packing: bool = True
    """Several examples in a row, without attention across them."""
    skip_bad_rows: bool = False
    lr: float = 1e-5
    schedule: str = "linear"
    warmup: float = 0.03
    """Steps, or a share of all steps if below 1."""
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    max_grad_norm: float = 1.0
    """0: no clipping; updates then run inside backward."""
    seed: int = 0
    eval_every: int | None = None
    eval_share: float = 0.0
    """Of the data held out if there is no ``eval_data``."""
    keep: str | None = None
    """Whose weights are written: of the "best" evaluation, of the "last" step, or "both"; None:
    see ``kept``."""
    save_every: int | None = None
    save_total_limit: int = 1
    resume: bool = False
    router_aux_loss: float | None = None
    """Coefficient of the load-balancing loss of MoE models; None: off."""
    skip_untouched_experts: bool = False
    """Leave experts alone that no token of a step's batch reached: see ``Engine``."""
    quant: str | None = None
    """LoRA: keep the base packed, as "q4" or "q8"; None: as it is, which may be a pack."""
    lora_r: int = 16
    lora_alpha: float = 32.0
    lora_dropout: float = 0.0
    lora_targets: tuple[str, ...] | None = None
    """None: every linear layer of the decoder."""
    merge: bool = False
    """LoRA: write the merged model, too."""
    threads: int | None = None

    @property
    def kept(self) -> str:
        """``keep``; by default the best if there are evaluations on the way to choose from."""
        return self.keep or ("last" if self.eval_every is None else "best")

    @property
    def retained(self) -> int:
        """Commits that are there at most when none is under way."""
        return self.save_total_limit + (self.kept != "last")
