"""What notebooks and terminals show of answers and models. Imports nothing heavy."""
