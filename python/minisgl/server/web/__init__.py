"""HTTP as all API families use it: connections, bodies, guards, errors, answers and streams.

What it is for: it reads a request's bytes within bounds, refuses what may not come in, and sends an
answer, whole or as events. What it does not know: an API's fields, tokens, processes. Read next:
`minisgl.server.web.respond`.
"""
