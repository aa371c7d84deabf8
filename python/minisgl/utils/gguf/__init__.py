"""Makes a checkpoint folder of a GGUF file: config.json and tokenizer files from its metadata.

What it is for: after `gguf_folder`, a file of llama.cpp is a checkpoint like any other. `families`
has the fields of config.json by architecture, `tokenizer` and `splits` the tokenizer, `hub` the
download. What it does not know: the weights; `minisgl.models.gguf` reads them. Needs the package
gguf. Read next: `minisgl.utils.gguf.folder`.
"""
