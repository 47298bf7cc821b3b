"""`python -m octavo.config`: print the table of options."""

from octavo.config.table import options_markdown

print(options_markdown())
