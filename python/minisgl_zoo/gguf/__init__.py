"""Files of llama.cpp (GGUF) as checkpoints: their configs, tokenizers and weights.

What it is for: `folder.gguf_folder` makes a checkpoint folder of a file. `families` has the fields
of config.json by architecture, `tokenizer` and `splits` the tokenizer, `hub` the download; these
import no torch. `checkpoint.GgufCheckpoint` shows the file's tensors as our layers declare them:
`names` has their names by architecture, `changes` what llama.cpp's converter changed, `places` both
together; `weight` multiplies by packed blocks. Read next: `folder`, then `checkpoint`.
"""
