"""The weights of a GGUF file of llama.cpp, as the tensors that our layers declare.

What it is for: `GgufCheckpoint` is a `Checkpoint`, and `GgufFormats` are its `Formats`. `names` has
the names by architecture, `changes` what llama.cpp's converter changed, `places` both together,
`tensors` the reading. What it does not know: config.json and tokenizers, which `minisgl.utils.gguf`
makes. Read next: `minisgl.models.gguf.checkpoint`.
"""
