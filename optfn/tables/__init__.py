"""Embedding tables: row-sparse arrays, hashed ids, tables whose rows several devices keep.

The public names are those of `optfn.sparse`.
"""
