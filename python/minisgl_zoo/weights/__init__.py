"""Quantised weights: one class per format, and the reader of each `quant_method`."""
