"""Batches: files of requests that are answered in what live requests leave, and resume."""
