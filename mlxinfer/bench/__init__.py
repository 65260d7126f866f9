"""What a user measures: a model on this machine, and a server under load."""
