"""The API families, each with its requests, handlers and answers.

What it is for: it turns JSON into prompts and sampling parameters, and text into JSON or
server-sent events. What it does not know: tokens, processes, sockets. Read next:
`minisgl.server.api.schema` (what the families have in common), then `minisgl.server.api.chat`, on
which the other families build.

The module of each family has `ROUTES`, a row of the table `routes`: what makes its routes, and the
roots of its schema in /openapi.json.
"""
