"""What clients and operators see beyond one model's chat: APIs, keys, replicas, watching.

What it is for: the APIs of other vendors, API keys and their limits, the router and replicas, the
page, the X-ray, the recorder, traces and energy. What it does not know: tensors. What to read next:
`chat`, the Protocol between the doors of other vendors' APIs and the server that answers.
"""
