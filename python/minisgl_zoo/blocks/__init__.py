"""Blocks and views of tensors that several families share."""
