"""Keys and values of several sequences: in RAM as one's would be, and on the disk only in part."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from offload.blocks import Tier
from offload.models.load import Options, prepare

TINY = Path(__file__).parents[2] / "examples" / "tiny_moe"
MIB = 2**20


def prepared(ram: int, **more: Any) -> Any:
    wish: dict[str, Any] = {"context": 512, "prompt_tokens": 64, "kv_block_tokens": 16}
    wish |= {"attention": "offload", "overhead_bytes": 4 * MIB, "sequences": 8, "pass_rows": 64}
    return prepare(TINY, Options(ram=ram, **{**wish, **more}))


def test_all_are_in_ram_where_there_is_room() -> None:
    one = prepared(96 * MIB, sequences=1)
    several = prepared(96 * MIB)
    in_ram, on_disk = several.kv.blocks
    assert on_disk == 0
    assert in_ram == 8 * one.kv.blocks[0]
    assert several.plan.reserves[Tier.RAM]["KV blocks"] >= in_ram * several.kv.homes.slot_bytes


def test_where_there_is_none_a_part_is_on_the_disk_and_the_budget_holds() -> None:
    whole = prepared(96 * MIB)
    ram = whole.minimum[Tier.RAM] - MIB
    some = prepared(ram)
    assert some.kv.blocks[1] > 0
    assert sum(some.kv.blocks) == sum(whole.kv.blocks)
    taken = some.plan.tiers[Tier.RAM].nbytes + sum(some.plan.reserves[Tier.RAM].values())
    assert taken <= ram


def test_a_plan_made_anew_for_more_sequences_takes_what_they_need() -> None:
    plan = prepared(40 * MIB, sequences=1)
    for count, spilled in ((4, False), (64, True), (2, False)):
        plan.options.sequences = count
        plan.replan()
        assert bool(plan.kv.blocks[1]) == spilled, count


def test_code_is_not_counted_in_a_budget(tmp_path: Path) -> None:
    """Numba is 50 MiB, and this budget is for less: what the options call on is imported before the
    bare process is weighed. In a process of its own, as others here have imported it all."""
    code = f"""
from pathlib import Path
from offload.models.load import Options, prepare
prepare(Path({str(TINY)!r}), Options(ram={40 * MIB}, context=256, prompt_tokens=64, __MORE__))
"""
    for more in ("attention='offload'", f"prompt_cache=Path({str(tmp_path)!r})"):
        done = subprocess.run(
            [sys.executable, "-c", code.replace("__MORE__", more)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr


def test_code_of_joined_sequences_is_there_before_a_device_is_planned_for() -> None:
    """Rows of several sequences are multiplied together for a simulated device, too: the first
    such product brought Numba, 100 MiB above the bare process whose weight was long known."""
    code = f"""
import sys
from pathlib import Path
from offload.models.load import Options, prepare
wish = Options(ram={2**30}, gpu={2**30}, device="sim", context=64, sequences=2)
prepare(Path({str(TINY)!r}), wish)
before = set(sys.modules)
from offload.cpu_ops import row_products
assert set(sys.modules) == before, sorted(set(sys.modules) - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
