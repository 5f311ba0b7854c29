"""Bytes: the RAM tier's book, chunk files, digests, repair."""
