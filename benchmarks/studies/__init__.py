"""Studies: benchmarks that answer a question once and are not in the suite.

python -m benchmarks.studies.NAME
"""
