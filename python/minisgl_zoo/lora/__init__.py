"""LoRA adapters beside a model that many requests share (docs/decisions/0059).

What it is for: reading adapters in PEFT's format (`peft`), the slots of the device that the
scheduler gives them (`slots`), and linear layers that add the adapters of a step's rows
(`weight`, `device`). What it does not know: names of adapters and HTTP. It is imported only if an
engine is started with adapters. Read next: `device`.
"""
