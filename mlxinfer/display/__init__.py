"""What notebooks and terminals show of answers, lists of answers and models. Imports nothing heavy."""
