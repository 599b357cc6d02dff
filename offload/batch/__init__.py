"""Many generations of one streamed model at once: weights are read once per pass for all."""
