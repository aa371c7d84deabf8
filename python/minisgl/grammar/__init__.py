"""Grammars: which tokens a request may output next. Imports no torch.

What it is for: a schema, regex, list of choices or grammar becomes one llguidance grammar, in the
tokenizer (`minisgl.grammar.compile`); each rank matches the committed tokens of a request with it
(`minisgl.grammar.maskers`). What it does not know: requests, tokenizers, how a mask is applied.
Read next: `minisgl.grammar.compile`.

Both use llguidance (Moskal et al., MIT licence): a lexer of regex derivatives over a trie of the
vocabulary, and an Earley parser above it. docs/decisions/0025-structured-output.md says why.
"""
