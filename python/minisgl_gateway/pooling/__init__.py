"""The doors of embeddings and scores: OpenAI's, Cohere's, Jina's, vLLM's and Ollama's forms.

What it is for: HTTP requests to prompts that are pooled, and back. What it does not know: how a
checkpoint embeds (`minisgl.message.pooling`). Read next: `door`.
"""
