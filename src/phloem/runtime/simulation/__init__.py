"""Simulation: the real actors on a seeded loop in virtual time, with faults and checkers."""
