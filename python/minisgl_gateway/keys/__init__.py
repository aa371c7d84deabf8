"""API keys: who may use the server, how much a minute, and whose turn it is."""
