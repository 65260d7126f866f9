"""Answers and models as notebooks and terminals show them. Imports nothing heavy."""
