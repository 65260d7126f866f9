"""The page at `/` and the routes that only it and the app need: its files, history, models."""
