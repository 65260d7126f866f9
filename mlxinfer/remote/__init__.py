"""A model behind a server, with the methods of one in this process. Imports nothing heavy."""
