"""Embedding tables: row-sparse arrays, their lookups, tables whose rows several devices keep.

The public names are those of `optfn.sparse`.
"""
