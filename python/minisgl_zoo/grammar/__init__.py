"""Grammars: which tokens a request may output next. Imports no torch.

What it is for: the tokenizer turns a schema, regex, list of choices or grammar into one grammar of
llguidance (`minisgl_zoo.grammar.compile`). With it each rank matches the committed tokens of a
request (`minisgl_zoo.grammar.maskers`). What it does not know: requests, tokenizers, how a mask is
applied. Read next: `minisgl_zoo.grammar.compile`.

llguidance (Moskal et al., MIT licence) has a lexer of regex derivatives over a trie of the
vocabulary, and an Earley parser above it. docs/decisions/0025-structured-output.md says why.
"""
