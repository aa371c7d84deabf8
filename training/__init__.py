"""Makes the built-in model: text from a seed, a tokenizer, a training loop, and a measurement.

Knows nothing of the engine; the result is a plain Hugging Face checkpoint folder.
Read next: `corpus.py` (what is taught), then `train.py`.
"""
