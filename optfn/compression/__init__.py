"""Compression of the updates that workers exchange."""
