"""Proposes the next tokens of sequences, so that a step of the engine verifies several at once.

A source proposes tokens (`ngram.py`, `draft.py`, `predictor.py`, `block.py`). The controller
decides how many proposals of each sequence are worth it (`controller.py`). `Speculation` puts both
together as the one `Proposer` of the engine. Proposals change how many steps an answer takes, never
its tokens.
"""
