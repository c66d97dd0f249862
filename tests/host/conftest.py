"""Fixtures of several files' tests."""

from postgres import postgresql_server, postgresql_url

__all__ = ["postgresql_server", "postgresql_url"]
