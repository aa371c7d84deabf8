"""Reads a checkpoint: config.json (`reading`), and the weights (`weight`)."""
