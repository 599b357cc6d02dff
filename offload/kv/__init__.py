"""Keys and values in blocks that live in RAM and on the SSD."""
