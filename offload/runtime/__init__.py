"""Memory, devices and threads: what carries out the instructions of ``offload.scheduler``."""
