"""A study: one run for each point of a grid, and what came of them. Nothing is run here."""

from stabilize.study.outcome import FAILURES, NUMBERS
from stabilize.study.plan import Cell, Study, base, cells

__all__ = ["FAILURES", "NUMBERS", "Cell", "Study", "base", "cells"]
