"""A KV cache in 8 bits: its pool, and the scales that a checkpoint has for it."""
