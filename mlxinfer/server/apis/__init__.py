"""The APIs: each file translates bodies into inputs of the session, and answers into replies."""
