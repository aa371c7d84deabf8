"""Images in prompts: `pip install "minisgl[vision]"`.

What it is for: a family's own processor and vision tower, as transformers has them. What it does
not know: scheduling; `minisgl.core.image` says how images travel. Read `family.py` first, then
`prompt.py` (the tokenizer's side), `reader.py` (a helper process that decodes) and `tower.py` (the
engine's side).
"""
