"""`phloem demo`: a real hybrid architecture served with and without the cache, and the proof.

`workloads` makes what is served, `measure` serves it twice and compares, `report` shows it. The
benchmarks use the same workloads and the same measuring.
"""
