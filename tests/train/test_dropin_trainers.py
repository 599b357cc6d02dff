"""Unmodified Trainer, SFTTrainer and PEFT over a streamed model, against the resident one."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dropin_support import PLACES, Rows, batches, close, resident, streamed
from engine_support import every_pair
from families import tiny_config, write

from offload.errors import OffloadError
from offload.train.optimizer import AdamW, trainer_optimizer

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

F32, BF16 = torch.float32, torch.bfloat16


@pytest.fixture(autouse=True)
def _third_parties() -> Iterator[None]:
    """Warnings of these libraries about themselves are not ours to fix."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module=r"(accelerate|trl|peft|datasets|torch)\b.*")
        warnings.filterwarnings("ignore", message=".*(pin_memory|lr_scheduler).*")
        # peft asks transformers for names that go in v6
        warnings.filterwarnings("ignore", message=".*will be removed in v6.*")
        yield


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[Any, Path] = {}

    def make(family: str = "llama", dtype: torch.dtype = F32) -> Path:
        if (family, dtype) not in made:
            made[family, dtype] = tmp_path_factory.mktemp("tiny") / family
            write(family, made[family, dtype], dtype)
        return made[family, dtype]

    return make


def arguments(output: Path, kind: Any = None, **how: Any) -> Any:
    """A large epsilon: gradients that are nothing but rounding move nothing."""
    kind = kind or transformers.TrainingArguments
    return kind(
        str(output),
        **{
            "per_device_train_batch_size": 2, "max_steps": 4, "learning_rate": 1e-3,
            "max_grad_norm": 0.5, "report_to": [], "use_cpu": True, "save_strategy": "no",
            "logging_steps": 1, "weight_decay": 0.01, "adam_epsilon": 1e-3, "disable_tqdm": True,
            "lr_scheduler_type": "linear", "seed": 1, **how,
        },
    )  # fmt: skip


def figures(trainer: Any) -> list[float]:
    """Losses, gradient norms and learning rates as logged, evaluations among them."""
    keys = ("loss", "grad_norm", "learning_rate", "eval_loss")
    return [entry[k] for entry in trainer.state.log_history for k in keys if k in entry]


def train(model: Any, args: Any, *, ours: bool, resume: Any = None, **more: Any) -> Any:
    if ours:
        more["optimizer_cls_and_kwargs"] = trainer_optimizer(args)
    trainer = transformers.Trainer(
        model=model, args=args, train_dataset=Rows(), eval_dataset=Rows(4), **more
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


HOWS: list[dict[str, Any]] = [{}, {"gradient_accumulation_steps": 3}, {"max_grad_norm": 0.0}]


@pytest.mark.parametrize(
    ("family", "how", "place"), every_pair(["llama", "qwen3_moe"], HOWS, PLACES)
)
def test_trainer(tiny: Any, tmp_path: Path, family: str, place: str, how: dict[str, Any]) -> None:
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=2, **how)
    wanted = resident(tiny(family))
    expected = figures(train(wanted, args, ours=False))
    with streamed(tiny(family), place) as model:
        found = figures(train(model, args, ours=True))
        assert len(found) == 4 * 3 + 2
        assert found == pytest.approx(expected, rel=5e-5)
        assert close(model, wanted)


class Pairs(Rows):
    """A source and what it becomes."""

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[i], "labels": self.ids[i, :7].clone()}


SEQ2SEQ: dict[str, dict[str, Any]] = {
    "t5": {"decoder_start_token_id": 0},
    "bart": {"decoder_start_token_id": 2},
    # Its sinusoids of positions are in no checkpoint.
    "marian": {"decoder_start_token_id": 2, "pad_token_id": 1},
}


@pytest.mark.parametrize("place", ["disk", "ram"])
@pytest.mark.parametrize("family", SEQ2SEQ)
def test_seq2seq_trainer(tmp_path: Path, family: str, place: str) -> None:
    """Its constructor does not take an optimizer's class: it is told afterwards."""
    config = tiny_config(family, **SEQ2SEQ[family])
    directory = tmp_path / family
    write(family, directory, F32, config=config, auto=transformers.AutoModelForSeq2SeqLM)
    args = arguments(tmp_path / "out", transformers.Seq2SeqTrainingArguments)

    def run(model: Any, *, ours: bool) -> list[float]:
        trainer = transformers.Seq2SeqTrainer(model=model, args=args, train_dataset=Pairs())
        if ours:
            trainer.optimizer_cls_and_kwargs = trainer_optimizer(args)
        trainer.train()
        return figures(trainer)

    wanted = transformers.AutoModelForSeq2SeqLM.from_pretrained(directory).train()
    for name, parameter in wanted.named_parameters():
        if "positions" in name and family == "marian":  # frozen, but for what loading forgets
            parameter.requires_grad_(False)
    expected = run(wanted, ours=False)
    with streamed(directory, place) as model:
        assert run(model, ours=True) == pytest.approx(expected, rel=5e-5)
        assert close(model, wanted)
        model.save_pretrained(tmp_path / "saved")
    assert close(transformers.AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "saved"), wanted)


@pytest.mark.parametrize("bf16", [False, True])
def test_trainer_of_a_bfloat16_model(tiny: Any, tmp_path: Path, bf16: bool) -> None:
    """torch keeps no float32 masters of it, and rounds norms: only the first step is the same."""
    directory = tiny("llama", BF16)
    args = arguments(tmp_path, bf16=bf16, max_steps=2)
    expected = figures(train(resident(directory, BF16), args, ours=False))
    with streamed(directory) as model:
        found = figures(train(model, args, ours=True))
        assert found[0] == expected[0]
        assert found[1:] == pytest.approx(expected[1:], rel=2e-2)


def test_trainer_under_autocast(tiny: Any, tmp_path: Path) -> None:
    args = arguments(tmp_path, bf16=True)
    wanted = resident(tiny())
    expected = figures(train(wanted, args, ours=False))
    with streamed(tiny()) as model:
        assert figures(train(model, args, ours=True)) == pytest.approx(expected, rel=1e-4)
        assert close(model, wanted, 1e-4)


def test_trainer_resumes(tiny: Any, tmp_path: Path) -> None:
    args = arguments(tmp_path / "out", save_strategy="steps", save_steps=2, save_total_limit=2)
    disk = tmp_path / "states"
    with streamed(tiny(), disk=disk, keep=2) as model:
        whole = train(model, args, ours=True)
        wanted = {n: p.detach().clone() for n, p in model.named_parameters()}
    checkpoint = tmp_path / "out" / "checkpoint-2"
    assert (checkpoint / "optimizer.pt").stat().st_size < 10_000
    with streamed(tiny(), "half", disk=disk, keep=2, resume=checkpoint) as model:
        assert close(model, resident(checkpoint), 0.0)
        again = train(model, args, ours=True, resume=str(checkpoint))
        assert figures(again) == figures(whole)
        assert all(torch.equal(p, wanted[n]) for n, p in model.named_parameters())
    with streamed(tiny()) as model, pytest.raises(OffloadError, match="load the model with"):
        train(model, args, ours=True, resume=str(checkpoint))


def test_a_trainer_that_was_not_told_says_what_to_do(tiny: Any, tmp_path: Path) -> None:
    with streamed(tiny()) as model, pytest.raises(OffloadError, match="trainer_optimizer"):
        train(model, arguments(tmp_path), ours=False)


def test_arguments_that_cannot_be_obeyed(tmp_path: Path) -> None:
    with pytest.raises(OffloadError, match=r"max_grad_norm is 0\.5"):
        trainer_optimizer(arguments(tmp_path), in_backward=True)
    with pytest.raises(OffloadError, match="adafactor"):
        trainer_optimizer(arguments(tmp_path, optim="adafactor"))
    best = {"save_strategy": "steps", "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2}
    with pytest.raises(OffloadError, match="best_model_checkpoint"):
        trainer_optimizer(arguments(tmp_path, load_best_model_at_end=True, **best))
    with pytest.raises(OffloadError, match="bf16_full_eval"):
        trainer_optimizer(arguments(tmp_path, bf16_full_eval=True))
    with pytest.raises(OffloadError, match="torch_compile"):
        trainer_optimizer(arguments(tmp_path, torch_compile=True))


def test_trainer_with_updates_inside_backward(tiny: Any, tmp_path: Path) -> None:
    args = arguments(tmp_path, max_grad_norm=0.0, gradient_accumulation_steps=2)
    wanted = resident(tiny())
    expected = figures(train(wanted, args, ours=False))
    with streamed(tiny()) as model:
        trainer = transformers.Trainer(
            model=model, args=args, train_dataset=Rows(),
            optimizer_cls_and_kwargs=trainer_optimizer(args, in_backward=True),
        )  # fmt: skip
        trainer.train()
        assert figures(trainer) == pytest.approx(expected, rel=5e-5)
        assert close(model, wanted)


# -- adapters ---------------------------------------------------------------------------------


def adapted(model: Any) -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(11)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["q_proj", "v_proj", "up_proj"],
        task_type="CAUSAL_LM", init_lora_weights="gaussian",
    )  # fmt: skip
    return peft.get_peft_model(model, config)


def adapters(model: Any) -> dict[str, torch.Tensor]:
    return {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("trains", ["adapters", True])
def test_peft_with_torchs_own_optimizer(tiny: Any, tmp_path: Path, place: str, trains: Any) -> None:
    args = arguments(tmp_path, gradient_accumulation_steps=2, learning_rate=1e-2)
    wanted = adapted(resident(tiny()))
    expected = figures(train(wanted, args, ours=False))
    with streamed(tiny(), place, train=trains) as model:
        ours = adapted(model)
        assert adapters(ours).keys() == adapters(wanted).keys()
        assert figures(train(ours, args, ours=False)) == pytest.approx(expected, rel=5e-5)
        for name, value in adapters(wanted).items():
            assert torch.allclose(adapters(ours)[name], value, atol=1e-5), name
        ours.save_pretrained(tmp_path / "adapter")
        assert {f.name for f in (tmp_path / "adapter").glob("*.safetensors")} == {
            "adapter_model.safetensors"
        }


@pytest.mark.parametrize(
    "how",
    [
        {"modules_to_save": ["embed_tokens", "lm_head"]},
        {"trainable_token_indices": [1, 2, 3]},
        {"layer_replication": [[0, 2], [1, 4]]},
    ],
    ids=lambda how: next(iter(how)),
)
def test_more_than_adapters_of_peft(tiny: Any, tmp_path: Path, how: dict[str, Any]) -> None:
    peft = pytest.importorskip("peft")
    args = arguments(tmp_path, learning_rate=1e-2)

    def more(model: Any) -> Any:
        torch.manual_seed(11)
        return peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **how)
        )

    wanted = more(resident(tiny()))
    expected = figures(train(wanted, args, ours=False))
    with streamed(tiny(), train="adapters") as model:
        ours = more(model)
        assert figures(train(ours, args, ours=False)) == pytest.approx(expected, rel=5e-5)
        assert adapters(ours).keys() == adapters(wanted).keys()
        for name, value in adapters(wanted).items():
            assert torch.allclose(adapters(ours)[name], value, atol=1e-5), name


def test_adapters_beside_biases_that_stream(tiny: Any, tmp_path: Path) -> None:
    """Each of the three errors named another one as the way out."""
    peft = pytest.importorskip("peft")

    def more(model: Any) -> Any:
        torch.manual_seed(11)
        return peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], bias="lora_only")
        )

    def run(model: Any, *optimizers: Any) -> list[float]:
        found = []
        for ids in batches(3):
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            found += [loss.item(), norm.item()]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return found

    wanted = more(resident(tiny("qwen2")))
    of_all = [p for p in wanted.parameters() if p.requires_grad]
    expected = run(wanted, torch.optim.AdamW(of_all, lr=1e-2, eps=1e-3))
    frozen = pytest.raises(OffloadError, match=r"q_proj.bias was frozen.*bias='none'")
    with streamed(tiny("qwen2"), train="adapters") as model, frozen:
        more(model)
    with streamed(tiny("qwen2"), train=lambda name: name.endswith("bias")) as model:
        ours = more(model)
        with pytest.raises(OffloadError, match=r"\(8\); the others.* one optimizer.*bias='none'"):
            train(ours, arguments(tmp_path), ours=False)
        ours.zero_grad()
        with pytest.raises(OffloadError, match=r"in memory.* one optimizer.*bias='none'"):
            train(ours, arguments(tmp_path), ours=True)
        names = {n: p for n, p in ours.named_parameters() if p.requires_grad}
        found = run(
            ours,
            AdamW([p for n, p in names.items() if "lora" not in n], 1e-2, eps=1e-3),
            torch.optim.AdamW([p for n, p in names.items() if "lora" in n], lr=1e-2, eps=1e-3),
        )
        assert found == pytest.approx(expected, rel=5e-5)
        for name, value in adapters(wanted).items():
            assert torch.allclose(adapters(ours)[name], value, atol=1e-5), name


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("mixtral", {"target_modules": "all-linear"}),
        ("qwen3_moe", {"target_parameters": ["mlp.experts.down_proj"], "target_modules": []}),
    ],
)
def test_adapters_of_fused_experts(tiny: Any, family: str, how: dict[str, Any]) -> None:
    """PEFT makes the one of the other, and the error only spoke of what nobody had changed."""
    peft = pytest.importorskip("peft")
    ids = next(batches(1))
    refused = pytest.raises(OffloadError, match=r"all-linear.*other target_mod.*--lora-targets")
    with streamed(tiny(family), train="adapters") as model, refused:
        peft.get_peft_model(model, peft.LoraConfig(r=4, **how))(input_ids=ids, labels=ids)


def test_adapters_of_embeddings_are_saved_without_these(tiny: Any, tmp_path: Path) -> None:
    """PEFT wants to write the embeddings themselves beside them, unless told not to."""
    peft = pytest.importorskip("peft")
    ids = torch.tensor([[5, 6, 7, 8]])
    with streamed(tiny(), train="adapters") as model:
        config = peft.LoraConfig(r=4, target_modules=["embed_tokens"], task_type="CAUSAL_LM")
        ours = peft.get_peft_model(model, config)
        for name, p in ours.named_parameters():
            if "lora_embedding" in name:
                torch.nn.init.normal_(p, std=0.1)
        with pytest.raises(OffloadError, match="save_embedding_layers=False"):
            ours.save_pretrained(tmp_path / "whole")
        ours.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
        with torch.no_grad():
            found = ours.eval()(input_ids=ids).logits
    back = peft.PeftModel.from_pretrained(resident(tiny()), str(tmp_path / "adapter")).eval()
    with torch.no_grad():
        assert torch.allclose(found, back(input_ids=ids).logits, atol=1e-5)


# -- TRL --------------------------------------------------------------------------------------


@contextlib.contextmanager
def tokenizer(directory: Path) -> Iterator[Any]:
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {w: i for i, w in enumerate(["<pad>", "<eos>", "<unk>", *map(str, range(3, 100))])}
    made = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    yield transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def sft(model: Any, directory: Path, *, ours: bool, **how: Any) -> Any:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    args = arguments(directory, trl.SFTConfig, bf16=False, max_length=16, **how)
    rows = [" ".join(map(str, ids.tolist())) for ids in Rows().ids]
    more = {"optimizer_cls_and_kwargs": trainer_optimizer(args)} if ours else {}
    with tokenizer(directory) as words:
        trainer = trl.SFTTrainer(
            model=model, args=args, train_dataset=datasets.Dataset.from_dict({"text": rows}),
            processing_class=words, **more,
        )  # fmt: skip
        trainer.train()
    return trainer


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_sft(tiny: Any, tmp_path: Path, family: str, place: str) -> None:
    """Its loss reads ``lm_head.weight`` slice by slice, and never calls the head."""
    wanted = resident(tiny(family))
    expected = figures(sft(wanted, tmp_path, ours=False))
    with streamed(tiny(family), place) as model:
        assert figures(sft(model, tmp_path, ours=True)) == pytest.approx(expected, rel=5e-5)
        assert close(model, wanted)


@pytest.mark.parametrize("place", PLACES)
def test_sft_of_adapters(tiny: Any, tmp_path: Path, place: str) -> None:
    wanted = adapted(resident(tiny()))
    expected = figures(sft(wanted, tmp_path, ours=False))
    with streamed(tiny(), place, train="adapters") as model:
        ours = adapted(model)
        assert figures(sft(ours, tmp_path, ours=False)) == pytest.approx(expected, rel=5e-5)
        for name, value in adapters(wanted).items():
            assert torch.allclose(adapters(ours)[name], value, atol=1e-5), name
