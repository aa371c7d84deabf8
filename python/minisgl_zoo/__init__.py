"""What the core does not name: other families, layers, weight formats, answers.

What it is for: families beyond Llama, Mistral and Qwen; recurrent and latent layers with their
cache groups; quantised weights and GGUF files; formats of tool calls; grammars. What it does not
know: scheduling, HTTP, processes. It imports the core, and the core finds it by `minisgl.plugins`.
"""
