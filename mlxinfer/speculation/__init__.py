"""Proposes the next tokens of sequences, so that a step of the engine verifies several at once.

A source proposes (`ngram.py`, `draft.py`, `forced.py`), the controller says how many proposals of
each sequence pay (`controller.py`), and `Speculation` hands both to the engine as one `Proposer`.
Proposals change how many steps an answer takes, never what it says.
"""
