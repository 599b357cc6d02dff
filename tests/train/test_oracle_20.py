"""Up to twenty steps of ``offload finetune`` against the resident oracle, bit for bit.

Whole runs, with their data pipeline, schedule, tiles on the disk, commits and evaluations: losses,
gradient norms, evaluation losses, weights, masters and moments. Of the product of model, budget,
clipping, accumulation, method, order and what happens between steps (1,152 cases) every pair of
values of two of them is tested on tiny models, every triple in the sweep, and there every pair on
the trained example, too: what two or three choices can break together shows in some case. Outside
of the sweep a case is as many steps as make 30 micro-batches, and the trained example six.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from dropin_support import streamed
from engine_support import assert_equal_weights, engine_of, group_at, oracle_of, placements
from equivalence import reference
from families import randomise
from lora_support import pinned
from run_oracle import Golden, assert_same_output, assert_same_states, golden
from run_support import Log, options_for, planned_once, write_data, write_model

from offload.train.engine import Group
from offload.train.optimizer import AdamW
from offload.train.oracle import Oracle
from offload.train.preparing import prepare
from offload.train.run import Run

STEPS, MICRO_BATCHES = 20, 30
ENCODER_STEPS = 8
ROOT = Path(__file__).resolve().parents[2]
TINY_MOE = ROOT / "examples" / "tiny_moe"

MODELS = ("llama", "qwen3_moe", "tiny_moe")
PLACES = ("disk", "least", "half", "ram")
CLIPS = (0.3, 0.0)
ACCUMULATE = (1, 3, 5)
METHODS = ("full", "lora")
BETWEEN = ("nothing", "everything", "commits", "evaluations")


@dataclass(frozen=True)
class Case:
    model: str
    place: str
    clip: float
    accumulate: int
    method: str
    between: str
    order: str

    def __str__(self) -> str:
        clip = "clipped" if self.clip else "unclipped"
        return (
            f"{self.model}-{self.place}-{clip}-{self.accumulate}-{self.method}-{self.between}-"
            f"{self.order}"
        )


def covering(every: Sequence[Case], strength: int) -> list[Case]:
    """Greedily: the case that has most ``strength``-tuples of values that no case has yet, until
    none is left (a covering array; Cohen et al. 1997, "The AETG System", section 4).

    Cases of one oracle (all but place, between and order) are preferred: it then runs once.
    """
    has = {case: tuples(case, strength) for case in every}
    left = frozenset[Any]().union(*has.values())
    chosen: list[Case] = []
    oracles: set[Any] = set()
    while left:
        best = max(every, key=lambda c: len(left & has[c]) + 0.5 * (oracle_key(c) in oracles))
        chosen.append(best)
        oracles.add(oracle_key(best))
        left -= has[best]
    return sorted(chosen, key=lambda c: str(oracle_key(c)))


REAL_TEXT = Case("tiny_moe", "disk", 0.3, 1, "full", "evaluations", "usual")
"""A trained model, real text, a real router; all states and gradients on the disk."""


def product() -> list[Case]:
    return [
        Case(*values)
        for values in itertools.product(
            MODELS, PLACES, CLIPS, ACCUMULATE, METHODS, BETWEEN, ("vertical", "usual")
        )
    ]


def tuples(case: Case, strength: int) -> frozenset[Any]:
    return frozenset(itertools.combinations(enumerate(astuple(case)), strength))


def oracle_key(case: Case) -> Any:
    return case.model, case.clip, case.accumulate, case.method


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    planned_once(monkeypatch)


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path, int]]:
    """By name: a model, its data, tokens of a row."""
    place = tmp_path_factory.mktemp("given")
    made: dict[str, tuple[Path, Path, int]] = {}

    def get(name: str) -> tuple[Path, Path, int]:
        if name not in made:
            if name == "tiny_moe":
                made[name] = TINY_MOE, TINY_MOE / "heldout.txt", 48
            else:
                model = write_model(place / name, name)
                made[name] = model, write_data(place / f"{name}.jsonl", 40), 16
        return made[name]

    return get


@pytest.fixture(scope="module")
def oracles() -> dict[Any, Golden]:
    """Those that have run."""
    return {}


def put(run: Run, place: str) -> None:
    """Have the run keep ``place`` in RAM, whatever its budget says."""
    where = pinned(place) if run.adapters is not None else lambda layout: placements(layout)[place]
    object.__setattr__(run.plan, "placement", where(run.layout))


def check(
    case: Case, given: Callable[[str], tuple[Path, Path, int]], oracles: dict[Any, Golden],
    place: Path, steps: int = STEPS,
) -> None:  # fmt: skip
    model, data, width = given(case.model)
    commits = case.between in ("commits", "everything")
    evaluates = case.between in ("evaluations", "everything")
    key = *oracle_key(case), steps
    options = options_for(
        model, data, place, max_steps=steps, seq_len=width, batch_size=1,
        grad_accum=case.accumulate, lr=1e-3, schedule="cosine", warmup=4,
        max_grad_norm=case.clip, method=case.method, order=case.order, eval_share=0.1,
        eval_every=1 if evaluates else None, keep="last",
        save_every=1 if commits else None, **({"lora_r": 4} if case.method == "lora" else {}),
    )  # fmt: skip
    run = prepare(options)
    log = Log()
    try:
        put(run, case.place)
        if key not in oracles:
            oracles[key] = golden(run)
        want = oracles[key]
        run.train(log)
        assert len(set(want.losses.values())) == steps
        assert log.losses == want.losses
        assert log.norms == want.norms
        assert log.evals == (want.evals if evaluates else {steps: want.evals[steps]})
        assert log.commits == (list(range(1, steps + 1)) if commits else [steps])
        assert assert_same_states(run, want.oracle)
        if case.method == "full":
            assert_same_output(run, want.oracle)
    finally:
        run.close()


TINY = [case for case in product() if case.model != "tiny_moe"]
PAIRS = covering(TINY, 2)
TRIPLES = covering(TINY, 3)
TRAINED = covering(
    [case for case in product() if case.model == "tiny_moe" and case.accumulate <= 3], 2
)
"""Of the trained example, whose 128 experts and 100 MB of states take a step half a second."""


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", PAIRS, ids=str)
def test_every_pair(case: Case, given: Any, oracles: Any, tmp_path: Path) -> None:
    check(case, given, oracles, tmp_path, min(STEPS, MICRO_BATCHES // case.accumulate))


@pytest.mark.slow
@pytest.mark.parametrize("steps", [6, pytest.param(STEPS, marks=pytest.mark.sweep)])
def test_real_text(given: Any, oracles: Any, tmp_path: Path, steps: int) -> None:
    check(REAL_TEXT, given, oracles, tmp_path, steps)


@pytest.mark.sweep
@pytest.mark.parametrize("case", [*TRIPLES, *TRAINED], ids=str)
def test_twenty_steps(case: Case, given: Any, oracles: Any, tmp_path: Path) -> None:
    check(case, given, oracles, tmp_path)


# -- encoders: their own loop, their own loss -----------------------------------------------


def encoder(family: str) -> tuple[Any, Any]:
    """The class and config of a model that is not causal."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "intermediate_size": 128, "num_labels": 3,
    }  # fmt: skip
    if family == "vit":
        config = transformers.ViTConfig(image_size=32, patch_size=8, **sizes)
        return transformers.ViTForImageClassification, config
    config = transformers.BertConfig(vocab_size=128, **sizes)
    kind = "SequenceClassification" if family == "classifier" else "MaskedLM"
    return getattr(transformers, f"BertFor{kind}"), config


def inputs(family: str, step: int, micro: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + micro)
    kinds = torch.randint(3, (2,), generator=generator)
    if family == "vit":
        pixels = torch.randn((2, 3, 32, 32), generator=generator)
        return {"pixel_values": pixels.to(torch.bfloat16), "labels": kinds}
    ids = torch.randint(3, 100, (2, 12), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    labels = kinds
    if family == "masked":
        labels = torch.where(torch.rand(ids.shape, generator=generator) < 0.3, ids, -100)
        labels[0, 0] = ids[0, 0]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place, made = tmp_path_factory.mktemp("encoders"), {}
    for family in ("classifier", "masked", "vit"):
        kind, config = encoder(family)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = kind(config)
        randomise(model)
        model.to(torch.bfloat16).save_pretrained(place / family)
        made[family] = place / family
    return made


@pytest.mark.sampled(3)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("family", "clip", "accumulate"), [("classifier", 0.5, 3), ("masked", 0.5, 1), ("vit", 0.0, 1)]
)
def test_an_encoder(
    encoders: dict[str, Path], family: str, clip: float, accumulate: int, place: str
) -> None:
    """Both ways, dropout on; evaluated and drained between any two steps."""
    with engine_of(encoders[family], place) as (engine, _):
        oracle = oracle_of(encoders[family], engine.layout)
        for step in range(ENCODER_STEPS):
            engine.begin_forward()
            if not clip:
                engine.in_backward = group_at(step)
            for micro in range(accumulate):
                engine.last_micro_batch = micro + 1 == accumulate
                given = inputs(family, step, micro)
                losses = []
                for model in (engine.model, oracle.model):
                    torch.manual_seed(step)
                    losses.append(model(**given).loss)
                    (losses[-1] / accumulate).backward()
                assert torch.equal(*losses), (step, micro)
            engine.end_backward()
            norms = engine.step(group_at(step), clip).norm, oracle.step(group_at(step), clip)
            assert norms[0] == norms[1]
            engine.begin_forward()
            answers = []
            for model in (engine.model.eval(), oracle.model.eval()):
                with torch.no_grad():
                    answers.append(model(**inputs(family, 99, 0)).logits)
                model.train()
            assert torch.equal(*answers), step
        assert_equal_weights(engine, oracle)


@pytest.mark.parametrize("family", ["classifier", "masked", "vit"])
def test_an_encoder_in_a_loop_of_the_users(
    encoders: dict[str, Path], family: str, tmp_path: Path
) -> None:
    """``offload.load(train=True)`` and ``offload.AdamW``, as it is said in the documentation."""
    directory = encoders[family]
    with streamed(directory, "disk") as model:
        layout = model.offload.engine.layout
        oracle = Oracle(reference(directory, torch.bfloat16).train(), layout)
        optimizer = AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, ENCODER_STEPS)
        for step in range(ENCODER_STEPS):
            given = inputs(family, step, 0)
            losses = []
            for one in (model, oracle.model):
                torch.manual_seed(step)
                losses.append(one(**given).loss)
                losses[-1].backward()
            assert torch.equal(losses[0].detach(), losses[1].detach()), step
            group = Group(lr=optimizer.param_groups[0]["lr"], weight_decay=0.1)
            oracle.step(lambda _, group=group: group)  # type: ignore[misc]
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % 7 == 0:
                model.save_pretrained(tmp_path / "saved")
        assert_equal_weights(model.offload.engine, oracle)
        model.save_pretrained(tmp_path / "out")
    for name, value in reference(tmp_path / "out", torch.bfloat16).named_parameters():
        assert torch.equal(value, oracle.named[name]), name
