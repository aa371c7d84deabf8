"""The doors before a server of OpenAI's API (`minisgl gateway`).

`wire` writes requests and reads answers, `chat` asks the server, `serve` is the command.
"""
