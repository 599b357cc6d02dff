"""Training data: files of rows in, batches of token ids out, in memory that does not grow."""

from offload.train.data.batches import IGNORED, Batch, Batches
from offload.train.data.obstacles import packing_obstacle
from offload.train.data.opening import TrainData, open_data

__all__ = ["IGNORED", "Batch", "Batches", "TrainData", "open_data", "packing_obstacle"]
