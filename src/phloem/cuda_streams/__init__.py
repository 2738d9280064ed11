"""Bytes and time: pools, copies, fences, streams. Knows nothing of trees."""
