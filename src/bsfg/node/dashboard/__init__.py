"""The dashboard of a node: pages for people, live, beside the operations of the HTTP listener.

Read in this order: `door` (who comes in), `pages` (the files), `watch` and `feed` (what is shown, live), `history`
(the last hour), `records` (gaps and quarantine), `actions` (what operators decide).
"""

from bsfg.node.dashboard.dashboard import Dashboard as Dashboard
