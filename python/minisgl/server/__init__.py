"""The HTTP server: processes, command line and the API families.

What it is for: starting the workers and keeping an eye on them (`launch`), turning JSON into
request records and replies into JSON or server-sent events (`api_server` and one file per API
family). What it does not know: tokens' text, scheduling, models; those live behind the
`FrontendMsg` and `UserReply` records. It never imports torch in the API process. Read next:
`launch`, then `api_server`, then `openai_chat`.

Nothing is imported here: workers are spawned, and import this package before anything else.
"""
