"""Ollama's API: chats, completions, and the models of this server."""
