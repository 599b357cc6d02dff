"""Fine-tuning models that are larger than memory: weights, gradients and optimizer states stream."""
