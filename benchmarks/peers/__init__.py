"""Prefix caches side by side: one harness, one adapter for each library, one process for each.

`python -m benchmarks.peers` runs the matrix and prints the ratios; `protocol.py` says what a
library must offer to join.
"""
