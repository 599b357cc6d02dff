"""What the options say about experts, checked against the model."""

from __future__ import annotations

from offload.errors import OffloadError
from offload.models.options import Options
from offload.models.routing_tap import BUFFER_BYTES, RoutingRecorder, tap_bytes
from offload.models.units import Cut
from offload.runtime.routings import hot_experts
from offload.scheduler.policy import DEFAULT, SCORED

_NO_EXPERTS = "this model has no experts that are streamed one by one"


def policy_of(options: Options, chosen: Cut) -> tuple[str, tuple[str, ...]]:
    """The eviction policy, and for ``pinned`` all experts of a recorded routing, hottest first.

    Raises:
        OffloadError: an option that cannot take effect on this model, or a routing of another.
    """
    if options.expert_policy is not None and not chosen.groups:
        raise OffloadError(
            f"--expert-policy {options.expert_policy} cannot take effect: {_NO_EXPERTS}; drop it"
        )
    name = options.expert_policy or DEFAULT
    if options.routing is None:
        return name, ()
    return name, hot_experts(options.routing, {g.name: g.blocks for g in chosen.groups})


def check_recordable(options: Options, chosen: Cut) -> None:
    """Refuse before anything is loaded. Raises OffloadError."""
    if options.record_routing is not None and not chosen.groups:
        raise OffloadError(f"--record-routing cannot take effect: {_NO_EXPERTS}; drop it")


def recorder_of(options: Options, chosen: Cut, model: str) -> RoutingRecorder | None:
    """The file to record into, made now; None without the option. Raises OffloadError."""
    check_recordable(options, chosen)
    if options.record_routing is None:
        return None
    return RoutingRecorder(options.record_routing, chosen.groups, model)


def listening_bytes(options: Options, chosen: Cut, rows: int) -> int:
    """What listening to routers takes at most, for ``rows`` tokens at once; 0 if nobody does."""
    scored = (options.expert_policy or DEFAULT) in SCORED
    if not chosen.groups or not (scored or options.record_routing is not None):
        return 0
    most = max(g.n_experts for g in chosen.groups)
    return tap_bytes(rows, most) + (BUFFER_BYTES if options.record_routing is not None else 0)
