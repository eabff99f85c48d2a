"""Reports of a comparison: a table for a terminal, Markdown, CSV, JSON, and an HTML page with charts."""

from offbeat.league.report._page import page
from offbeat.league.report._text import WIDTH, csv_of, fine_print, json_of, markdown, problems, table

__all__ = ["WIDTH", "csv_of", "fine_print", "json_of", "markdown", "page", "problems", "table"]
