"""The models of a server: their entries and states, loading and unloading, memory budgets."""
