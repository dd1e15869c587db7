"""Embedding tables: row-sparse arrays, hashed ids, tables whose rows several devices keep.

`optfn.sparse` has the public names.
"""
