"""What a model is built of: the decoder with its block, and mixtures of experts."""
