"""The errors a user can meet. Each message gives numbers and a way out.

The command line prints the message of an ``OffloadError`` and exits with code 2; anything else is
a bug and shows its traceback.
"""

from __future__ import annotations


class OffloadError(Exception):
    """Base of every error that is the user's to act on."""


class CheckpointError(OffloadError):
    """A checkpoint is damaged, incomplete, or not what its config says."""


class StoreError(OffloadError):
    """A durable block could not be read or written."""


class PlanError(OffloadError):
    """No placement obeys the budgets; the message says by how many bytes and what to change."""


class UnsupportedModelError(OffloadError):
    """The model is of a kind that cannot be streamed; the message says why."""


class DataError(OffloadError):
    """Training data cannot be used; the message names file and line and what was found there."""


class ClosedError(OffloadError):
    """Something was used after close()."""


class SchedulerError(RuntimeError):
    """An illegal move of the residency state machine: a bug here, never the user's mistake.

    The message carries the block's story (its last transitions).
    """


class WatchdogError(OffloadError):
    """A wait took longer than its limit without any progress."""


class DeviceError(OffloadError):
    """The card failed in the middle of the work; nothing on it can be trusted any more."""
