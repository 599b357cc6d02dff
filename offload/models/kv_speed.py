"""What keys and values behind a token do to a plan's speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from offload.models.kv_plan import KvPlan
from offload.scheduler.bounds import COMPUTE, READ
from offload.scheduler.costs import CostModel, Pick
from offload.scheduler.plan import Plan


def predicted(plan: Plan, kv: KvPlan, costs: CostModel | None) -> Plan:
    """The plan's speed with the reads and copies of keys and values at the end of the context.

    Reads share the disk with streamed weights; copies (RAM to the gathered layer) are the computing
    thread's own time, and so is reading where blocks are attended to in place.
    """
    moved = kv.need.token_bytes * kv.need.context * kv.need.sequences
    return _slower(plan, costs, kv.disk_bytes_per_token, lambda c: c.memcpy_s(moved))


def attended(plan: Plan, nbytes: float, costs: CostModel | None) -> Plan:
    """The plan's speed where kernels that compute whole layers go over ``nbytes`` of keys and
    values for a token at the end of the context."""
    return _slower(plan, costs, 0, lambda c: c.attend_s(nbytes))


def _slower(
    plan: Plan, costs: CostModel | None, read: int, compute_s: Callable[[CostModel], float]
) -> Plan:
    """With so many bytes more from the disk, and so much more to compute, for a token."""
    if costs is None or plan.predicted_pass_s is None:
        return plan
    lane_s = dict(plan.lane_s)
    lane_s[READ] = lane_s.get(READ, 0.0) + costs.read_busy_s(read)
    lane_s[COMPUTE] = lane_s.get(COMPUTE, 0.0) + compute_s(costs)

    def pass_s(before: float, costs: CostModel) -> float:
        weights_s = plan.lane_s.get(READ, 0.0)
        return max(before + compute_s(costs), weights_s + costs.read_busy_s(read))

    found = plan.predicted_pass_s
    times = sorted(
        pass_s(t, costs.at(p))
        for t, p in zip((found.low, found.mid, found.high), Pick, strict=True)
    )
    return dataclasses.replace(
        plan,
        lane_s=lane_s,
        bound_pass_s=max(lane_s.values()),
        predicted_pass_s=dataclasses.replace(found, low=times[0], mid=times[1], high=times[2]),
    )
