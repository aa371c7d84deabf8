"""Fixtures of servers."""

from helpers.server_fixtures import certificate, client, http, pool, server

__all__ = ["certificate", "client", "http", "pool", "server"]
