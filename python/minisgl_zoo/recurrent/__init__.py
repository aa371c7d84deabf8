"""Recurrent layers: their sizes, cache groups, pools and backends."""
