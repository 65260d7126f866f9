"""Renders the conversations of `samples.py` in a process that may be killed (`killable`).

A job is {"sources": {name: jinja source}, "variables": {name: text}}, and its reply
{conversation: rendering or null}.
"""

from typing import Any

from ..killable import serve
from .samples import rendered_samples
from .template import ChatTemplate


def answer(job: dict[str, Any]) -> dict[str, str | None]:
    """Return the reply to a job."""
    return rendered_samples(ChatTemplate(job["sources"], variables=job["variables"]))


if __name__ == "__main__":
    serve(answer, idle_s=5.0)
