"""`python -m tools.pages`: renew every page that is written from the code."""

from tools.pages import write

write()
