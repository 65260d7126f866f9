"""What is observed of a running server: counts, whether models make progress, the log."""
