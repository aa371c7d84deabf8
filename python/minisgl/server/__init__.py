"""The HTTP server, from its command line to its answers.

What it is for: it starts and ends one server (`launch`, `server`), turns JSON into request records,
and turns replies into JSON or server-sent events. `api/` has one file per API family and the fields
of requests and answers. Below it, `web/` has connections, bodies, guards, errors and streams, and
knows no API's fields. Below that, `frontend` sends prompts to the workers.
What it does not know: tokens' text, scheduling, models; those are behind the records `FrontendMsg`
and `UserReply`. The API process imports no torch. Read next: `launch`, then `api_server`, then
`api.chat`.
"""
