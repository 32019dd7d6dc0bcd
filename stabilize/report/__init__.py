"""One self-contained HTML page from run folders: what Weights & Biases would show, without network and on a phone."""

from stabilize.report.page import page
from stabilize.report.run_folder import Run, read

__all__ = ["Run", "page", "read"]
