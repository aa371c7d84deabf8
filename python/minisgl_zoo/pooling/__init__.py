"""Embeddings and scores: which rows of a prompt are pooled, and what is made of them.

What it is for: `recipe` reads how a released checkpoint embeds, `rows` pools hidden states in a
step, `rerank` writes the prompts of pairs. What it does not know: HTTP and how a step is planned
(`minisgl.core.plan.Pooled`). Read next: `recipe`, docs/decisions/0058.
"""
