"""Train the tiny Qwen3-MoE language model of this folder from scratch, on one CPU core.

    apt-get install python3.11-doc
    python examples/tiny_moe/train.py --out /tmp/tiny_moe

Corpus (``corpus.py``) -> byte-level BPE tokenizer -> AdamW with a cosine schedule and the router's
load-balancing loss -> a bfloat16 checkpoint in the standard Hugging Face layout, with its loss
curve and held-out scores beside it. About half an hour of one core. ``--measure`` times the
expert implementations that transformers offers; ``--evaluate`` scores an existing checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from corpus import Page, read_pages
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

END = "<|endoftext|>"
# The model continues text, it was never taught turns: the template only joins what was said.
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ message['content'] }}{% endfor %}"
)
VOCAB = 2048
SEED = 20240229
# A few KB of one held-out page are kept beside the model, for tests without the corpus.
EXCERPT_PAGE = "howto/regex.html"
EXCERPT_CHARS = 6000


def make_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A byte-level BPE: every string, in any script, survives encode and decode unchanged."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB,
            special_tokens=[END],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token=END,
        pad_token=END,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def make_config() -> Qwen3MoeConfig:
    """5.7 M parameters, 1.2 M of them used per token: 8 layers of 16 experts, top-2."""
    return Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=128,
        intermediate_size=384,
        moe_intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=16,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        max_position_embeddings=1024,
        rope_theta=10000.0,
        # Untied, although the table is small: the head then is a matrix of its own to be streamed.
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=0,
        use_cache=False,
    )


def encode(tokenizer: PreTrainedTokenizerFast, pages: list[Page]) -> torch.Tensor:
    """The pages one after the other, each closed by the end token: ``[T]``, int64."""
    ids: list[int] = []
    for page in pages:
        ids += tokenizer.backend_tokenizer.encode(page.text).ids
        ids.append(tokenizer.eos_token_id)
    return torch.tensor(ids, dtype=torch.int64)


def windows(ids_T: torch.Tensor, seq: int, generator: torch.Generator) -> torch.Tensor:
    """One epoch: all windows of ``seq`` tokens from a random phase, shuffled: ``[N, seq]``."""
    phase = int(torch.randint(seq, (1,), generator=generator))
    n = (len(ids_T) - phase) // seq
    rows = ids_T[phase : phase + n * seq].view(n, seq)
    return rows[torch.randperm(n, generator=generator)]


@torch.no_grad()
def held_out_loss(model: Qwen3MoeForCausalLM, ids_T: torch.Tensor, seq: int, most: int) -> float:
    """Mean cross-entropy in nats per token over at most ``most`` windows, router loss excluded."""
    model.eval()
    rows = ids_T[: len(ids_T) // seq * seq].view(-1, seq)[:most]
    total = 0.0
    for row in rows.split(8):
        logits = model(input_ids=row, output_router_logits=False).logits[:, :-1].float()
        total += float(
            torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), row[:, 1:].flatten(), reduction="sum"
            )
        )
    model.train()
    return total / (len(rows) * (seq - 1))


@torch.no_grad()
def expert_shares(model: Qwen3MoeForCausalLM, ids_T: torch.Tensor, seq: int) -> torch.Tensor:
    """How often each expert of each layer is chosen: ``[L, E]``, rows sum to 1 (even: 1/E)."""
    config = model.config
    chosen_LE = torch.zeros(config.num_hidden_layers, config.num_experts)
    for row in ids_T[: len(ids_T) // seq * seq].view(-1, seq).split(8):
        found = model(input_ids=row, output_router_logits=True).router_logits
        for layer, logits_TE in enumerate(found):
            top = logits_TE.topk(config.num_experts_per_tok).indices.flatten()
            chosen_LE[layer] += torch.bincount(top, minlength=config.num_experts)
    return chosen_LE / chosen_LE.sum(-1, keepdim=True)


def bigram_loss(train_T: torch.Tensor, test_T: torch.Tensor) -> tuple[float, float]:
    """(unigram, bigram) cross-entropy of ``test_T`` in nats per token; counts from ``train_T``.

    The bigram interpolates with the unigram (weight n/(n+k) for a context seen n times, k the best
    of a few values on the test text itself, in the baseline's favour); the unigram adds one.
    """
    counts = torch.bincount(train_T, minlength=VOCAB).double()
    p_unigram = (counts + 1) / (counts.sum() + VOCAB)
    pairs = Counter(zip(train_T[:-1].tolist(), train_T[1:].tolist(), strict=True))
    left, right = test_T[:-1], test_T[1:]
    seen = torch.tensor(
        [pairs[a, b] for a, b in zip(left.tolist(), right.tolist(), strict=True)]
    ).double()
    unigram = -p_unigram[right].log().mean()
    bigram = min(
        float(-((seen + k * p_unigram[right]) / (counts[left] + k)).log().mean())
        for k in (1, 4, 16, 64, 256, 1024)
    )
    return float(unigram), bigram


def excerpt(pages: list[Page]) -> str:
    """The first whole lines of ``EXCERPT_PAGE``, at most ``EXCERPT_CHARS`` characters."""
    (page,) = (page for page in pages if page.name == EXCERPT_PAGE and page.held_out)
    return page.text[: page.text.rindex("\n", 0, EXCERPT_CHARS) + 1]


def evaluate(out: Path, pages: list[Page], seq: int) -> dict[str, Any]:
    """Scores of the checkpoint in ``out`` as it was saved; writes ``heldout.txt`` beside it.

    Losses are in nats per token; expert shares are the extremes over all layers, on held-out text.
    """
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    tokenizer = AutoTokenizer.from_pretrained(out)
    text = excerpt(pages)
    (out / "heldout.txt").write_text(text, encoding="utf-8")
    train_T = encode(tokenizer, [page for page in pages if not page.held_out])
    test_T = encode(tokenizer, [page for page in pages if page.held_out])
    few_T = torch.tensor(tokenizer.backend_tokenizer.encode(text).ids)
    scores: dict[str, Any] = {"uniform": round(math.log(VOCAB), 3)}
    for name, ids_T in (("held_out", test_T), ("excerpt", few_T)):
        unigram, bigram = bigram_loss(train_T, ids_T)
        scores[name] = {
            "tokens": len(ids_T),
            "unigram": round(unigram, 3),
            "bigram": round(bigram, 3),
            "model": round(held_out_loss(model, ids_T, seq, 10**9), 3),
        }
    shares_LE = expert_shares(model, test_T, seq)
    even = 1 / model.config.num_experts
    scores["expert_share"] = {
        "least": round(float(shares_LE.min()), 4),
        "even": even,
        "most": round(float(shares_LE.max()), 4),
        "under_a_tenth_of_even": int((shares_LE < even / 10).sum()),
    }
    return scores


def balance_loss(router_logits: tuple[torch.Tensor, ...], k: int) -> torch.Tensor:
    """Load balance (Switch Transformer, eq. 4), mean over layers: 1 when every layer is even.

    Layer by layer. The loss that transformers computes pools all layers first; trained with that,
    experts 0..15 were used evenly over the model as a whole while each layer left some idle.
    """
    total = torch.zeros(())
    for logits_TE in router_logits:
        share_TE = logits_TE.float().softmax(-1)
        chosen_E = torch.zeros_like(share_TE).scatter_(1, share_TE.topk(k).indices, 1.0 / k).mean(0)
        total = total + logits_TE.shape[1] * (chosen_E * share_TE.mean(0)).sum()
    return total / len(router_logits)


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up over 2 % of the run, then a cosine down to 2 % of the peak."""
    warm = max(1, steps // 50)
    if step < warm:
        return peak * (step + 1) / warm
    along = (step - warm) / max(1, steps - warm)
    return peak * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * along)))


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    return torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        lr=1.0,
        betas=(0.9, 0.95),
        fused=True,
    )


def train(
    model: Qwen3MoeForCausalLM,
    train_T: torch.Tensor,
    test_T: torch.Tensor,
    args: argparse.Namespace,
) -> dict[str, list[float]]:
    """Runs ``args.steps`` steps, or up to ``args.minutes``; returns the curve.

    The schedule follows whichever of the two limits is nearer, so a run that is cut by the clock
    still ends with a cooled learning rate.
    """
    generator = torch.Generator().manual_seed(SEED)
    optimizer = make_optimizer(model)
    curve: dict[str, list[float]] = {"step": [], "train": [], "balance": [], "held_out": []}
    rows = windows(train_T, args.seq, generator)
    at, started = 0, time.monotonic()
    sum_loss = sum_balance = 0.0
    since = 0
    step = 0
    while step < args.steps:
        clock = (time.monotonic() - started) / (args.minutes * 60)
        along = max(step, min(int(clock * args.steps), args.steps))
        if clock >= 1.0:
            break
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(along, args.steps, args.lr)
        if at + args.batch > len(rows):
            rows, at = windows(train_T, args.seq, generator), 0
        batch = rows[at : at + args.batch]
        at += args.batch
        out = model(input_ids=batch, output_router_logits=True)
        loss = torch.nn.functional.cross_entropy(
            out.logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten()
        )
        balance = balance_loss(out.router_logits, model.config.num_experts_per_tok)
        optimizer.zero_grad(set_to_none=True)
        (loss + args.balance * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        sum_loss += float(loss.detach())
        sum_balance += float(balance.detach())
        since += 1
        if step % 50 == 0 or step == 1:
            curve["step"].append(step)
            curve["train"].append(round(sum_loss / since, 4))
            curve["balance"].append(round(sum_balance / since, 4))
            curve["held_out"].append(
                round(held_out_loss(model, test_T, args.seq, 32), 4) if step % 250 == 0 else -1.0
            )
            print(
                f"step {step} ({100 * along / args.steps:.0f} %)  train {curve['train'][-1]:.3f}  "
                f"balance {curve['balance'][-1]:.3f}  held-out {curve['held_out'][-1]:.3f}  "
                f"{time.monotonic() - started:.0f} s",
                flush=True,
            )
            sum_loss = sum_balance = 0.0
            since = 0
    return curve


def measure(config: Qwen3MoeConfig, train_T: torch.Tensor, args: argparse.Namespace) -> None:
    """Seconds per step of each expert implementation; the first two steps are not counted."""
    for implementation in ("eager", "grouped_mm", "batched_mm"):
        torch.manual_seed(SEED)
        model = Qwen3MoeForCausalLM._from_config(config, experts_implementation=implementation)
        optimizer = make_optimizer(model)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        started = 0.0
        for step in range(10):
            if step == 2:
                started = time.monotonic()
            batch = train_T[: args.batch * args.seq].view(args.batch, args.seq)
            model(input_ids=batch, labels=batch).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        print(f"{implementation}: {(time.monotonic() - started) / 8:.3f} s per step", flush=True)


def save_plot(curves: list[dict[str, list[float]]], bigram: float, path: Path) -> None:
    """The phases' loss curves as a PNG; needs matplotlib (``pip install 'offload[plot]'``)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.6), dpi=90, layout="constrained")
    base = 0.0
    for curve in curves:
        steps = [base + step for step in curve["step"]]
        label = {} if base else {"label": "training"}
        axes.plot(steps, curve["train"], linewidth=1, color="tab:blue", **label)
        held = [h if h > 0 else math.nan for h in curve["held_out"]]
        shown = [s for s, h in zip(steps, held, strict=True) if h == h]
        label = {} if base else {"label": "held out"}
        axes.plot(shown, [h for h in held if h == h], ".-", color="tab:orange", lw=1, **label)
        base = steps[-1]
    axes.axhline(bigram, linestyle=":", color="grey", label="bigram, held out")
    axes.set(xlabel="step", ylabel="cross-entropy, nats per token")
    axes.legend()
    figure.savefig(path)
    plt.close(figure)


def save(model: Qwen3MoeForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write the bfloat16 checkpoint: published names, one tensor per expert and projection."""
    model = model.to(torch.bfloat16).eval()
    model.config.use_cache = True
    model.generation_config = GenerationConfig(
        do_sample=True, temperature=0.8, top_p=0.95, eos_token_id=0, pad_token_id=0
    )
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    for key in ("is_local", "local_files_only"):  # where it was loaded from is no part of it
        tokenizer.init_kwargs.pop(key, None)
    tokenizer.save_pretrained(out)
    # Published Qwen3-MoE configs say num_experts, and readers other than transformers look for it.
    file = out / "config.json"
    text = file.read_text(encoding="utf-8").replace('"num_local_experts"', '"num_experts"')
    file.write_text(text, encoding="utf-8")
    (out / "model.safetensors").chmod(0o644)


def main() -> None:
    here = Path(__file__).resolve().parent
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--out", type=Path, default=here)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--minutes", type=float, default=28.0, help="limit of the training loop")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--seq", type=int, default=192)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--balance", type=float, default=0.08, help="weight of the balance loss")
    parser.add_argument("--init", type=Path, help="go on from this checkpoint and its loss.json")
    parser.add_argument("--experts", default="grouped_mm", help="transformers' implementation")
    parser.add_argument("--measure", action="store_true", help="time the implementations and stop")
    parser.add_argument("--evaluate", action="store_true", help="score --out and stop")
    args = parser.parse_args()

    torch.manual_seed(SEED)
    pages = read_pages()
    train_pages = [page for page in pages if not page.held_out]
    test_pages = [page for page in pages if page.held_out]
    report_file = args.out / "loss.json"
    if args.evaluate:
        report = json.loads(report_file.read_text(encoding="utf-8"))
    else:
        before = None
        if args.init:
            tokenizer = AutoTokenizer.from_pretrained(args.init)
            before = json.loads((args.init / "loss.json").read_text(encoding="utf-8"))
        else:
            tokenizer = make_tokenizer([page.text for page in train_pages])
        train_T, test_T = encode(tokenizer, train_pages), encode(tokenizer, test_pages)
        print(f"{len(train_T)} training tokens, {len(test_T)} held out", flush=True)
        config = make_config()
        if args.measure:
            measure(config, train_T, args)
            return
        if args.init:
            model = Qwen3MoeForCausalLM.from_pretrained(
                args.init, dtype=torch.float32, experts_implementation=args.experts
            ).train()
        else:
            model = Qwen3MoeForCausalLM._from_config(config, experts_implementation=args.experts)
        started = time.monotonic()
        curve = train(model, train_T, test_T, args)
        phase = {
            "steps": curve["step"][-1],
            "batch": args.batch,
            "seq": args.seq,
            "peak_lr": args.lr,
            "balance": args.balance,
            "balance_of": "each layer",
            "minutes": round((time.monotonic() - started) / 60, 1),
            "curve": curve,
        }
        report = {
            "parameters": sum(p.numel() for p in model.parameters()),
            "train_tokens": len(train_T),
            "phases": [*(before["phases"] if before else []), phase],
        }
        save(model, tokenizer, args.out)
    report["scores"] = evaluate(args.out, pages, args.seq)
    report_file.write_text(json.dumps(report) + "\n", encoding="utf-8")
    bigram = report["scores"]["held_out"]["bigram"]
    save_plot([phase["curve"] for phase in report["phases"]], bigram, args.out / "loss.png")
    print(json.dumps(report["scores"]))


if __name__ == "__main__":
    main()
