"""Policies of papers and other systems, re-created on the production tree to be compared with."""
