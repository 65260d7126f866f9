"""Benchmarks for users: a model on this machine, and a server under load."""
