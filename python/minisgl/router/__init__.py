"""A router over replicas: each request goes where its first token is expected soonest.

What it is for: `minisgl route` listens on one port and passes requests on to servers that are
started by hand, with their prefixes, queues and measured rates in view. What it does not know:
models, tokenizers, torch. Read in this order: `index` (which replica has a prefix), `choice` (where
a request goes), `view` (what is known of each replica), `proxy` (HTTP).
"""
