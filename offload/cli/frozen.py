"""``--plan-out`` and ``--plan``: plans in files."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from offload.errors import PlanError
from offload.models.naming import model_name
from offload.models.prepared import Prepared
from offload.runtime.hardware_cache import machine_key
from offload.scheduler.plan_file import Identity, document, read_identity, restore

REPLAY_ROOM = 2**20
"""Set aside in a plan that is written: what a process weighs differs by some hundred KiB from run
to run, and a frozen plan cannot give way."""


def whose(prepared: Prepared) -> Identity:
    """Model and machine of a plan."""
    options, directory = prepared.options, prepared.meta.directory
    machine = (
        options.hardware.name
        if options.elsewhere and options.hardware is not None
        else machine_key(directory, torch.get_num_threads())
    )
    return Identity(
        model=model_name(directory),
        config=hashlib.sha256((directory / "config.json").read_bytes()).hexdigest(),
        machine=machine,
        context=options.context,
        prompt_tokens=options.prompt_tokens or options.context,
    )


def frozen_json(prepared: Prepared) -> dict[str, Any]:
    """What ``--plan-out`` writes."""
    return document(prepared.plan, whose(prepared))


class Frozen:
    """A plan in a file.

    Raises:
        PlanError: it cannot be read, or is no plan.
    """

    def __init__(self, path: Path) -> None:
        self.where = f"--plan {path}"
        try:
            data = json.loads(path.expanduser().read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise PlanError(f"{self.where} cannot be read: {error}") from error
        self.who = read_identity(data, self.where)
        self._data: Mapping[str, Any] = data

    def context(self, asked: int | None) -> int:
        """The plan's context. Raises PlanError if another was asked for."""
        if asked not in (None, self.who.context):
            raise PlanError(
                f"{self.where} was made with --context {self.who.context}; drop --context {asked}"
            )
        return self.who.context

    def prompt_tokens(self, tokens: int) -> int:
        """The prompt that the plan has room for. Raises PlanError if ``tokens`` are more."""
        if tokens > self.who.prompt_tokens:
            raise PlanError(
                f"{self.where} has room for a prompt of {self.who.prompt_tokens} tokens, and this "
                f"one has {tokens}; shorten it, or replan with --prompt-tokens {tokens}"
            )
        return self.who.prompt_tokens

    def apply(self, prepared: Prepared) -> None:
        """Have a run obey the plan. Raises PlanError: it is not this run's."""
        plan = restore(self._data, prepared.plan, whose(prepared), self.where)
        prepared.plan = prepared.aligned(plan)  # it may pin others than this run would have
        prepared.notes.append(f"the plan is that of {self.where.removeprefix('--plan ')}")
