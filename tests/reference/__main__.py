"""`python -m tests.reference`: write the parts of docs/ that the code gives."""

import tempfile
from pathlib import Path

from . import http_page, metrics_page, options_page, python_page, rewrite

if __name__ == "__main__":
    rewrite("python.md", python_page.page())
    rewrite("options.md", options_page.page())
    rewrite("metrics.md", metrics_page.page())
    with tempfile.TemporaryDirectory() as folder:
        rewrite("http.md", http_page.page(list(http_page.exchanges(Path(folder)))))
