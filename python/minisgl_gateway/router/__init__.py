"""A router before several servers, its replicas: each request goes where it costs least time.

What it is for: `minisgl route` listens on one port and passes requests on to running servers, by
their cached prefixes, queues and measured rates. What it does not know: models, tokenizers, torch.
Read in this order: `index` (which replica has a prefix), `choice` (which replica gets a request),
`view` (the state of each replica), `proxy` (HTTP).
"""
