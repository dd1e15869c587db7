"""Programs that are drawn, trained by optfn and by a reference run, and compared.

A program (`program.py`) is a record of what a user can ask for. The reference run (`run.py`, with
the links of a chain in `links.py` and the loss in `model.py`) is slow, obvious and in float64, and
knows nothing of optfn. `source.py` writes a program as Python, which `product.py` runs and
compares. `draws.py` draws programs, `limits.py` names those that are left out, `known.py` known
faults and what optfn refuses, and `shrink.py` makes a failing program short.
`python -m reference_run --help`, with tests/ in PYTHONPATH, says the rest.
"""
