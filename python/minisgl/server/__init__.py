"""The HTTP server: command line, start and the API families.

What it is for: one server from its flags to its end (`launch`), and turning JSON into request
records and replies into JSON or server-sent events (`api_server`, and `api/` with one file per API
family). What it does not know: tokens' text, scheduling, models; those live behind the
`FrontendMsg` and `UserReply` records. It never imports torch in the API process. Read next:
`launch`, then `api_server`, then `api.chat`.
"""
