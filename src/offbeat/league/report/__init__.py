"""A league as a table for a terminal, as Markdown, as CSV, as JSON, and as a page with pictures."""

from offbeat.league.report._cells import fine_print, problems
from offbeat.league.report._page import page
from offbeat.league.report._table import WIDTH, table
from offbeat.league.report._text import csv_of, json_of, markdown

__all__ = ["WIDTH", "csv_of", "fine_print", "json_of", "markdown", "page", "problems", "table"]
