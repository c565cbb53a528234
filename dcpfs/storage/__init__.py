"""Bytes at a URL. Knows fsspec, not torch."""
