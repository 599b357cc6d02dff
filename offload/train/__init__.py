"""Fine-tuning models larger than memory: weights, gradients and optimizer states stream."""
