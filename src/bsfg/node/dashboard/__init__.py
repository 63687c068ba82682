"""The dashboard of a node: pages for people, live, beside the operations of the HTTP listener.

Read in this order: `sessions` (who comes in), `pages` (the files and the documentation), `feed` (what is shown, live),
`records` (gaps, quarantine, facts and the audit trail), `dashboard` (the routes, and what operators decide).
"""

from bsfg.node.dashboard.dashboard import Dashboard as Dashboard
