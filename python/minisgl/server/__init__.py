"""The HTTP server, from its command line to its answers.

What it is for: it starts and ends one server (`launch`), turns JSON into request records, and turns
replies into JSON or server-sent events (`api_server`, and `api/` with one file per API family).
What it does not know: tokens' text, scheduling, models; those are behind the records `FrontendMsg`
and `UserReply`. The API process imports no torch. Read next: `launch`, then `api_server`, then
`api.chat`.
"""
