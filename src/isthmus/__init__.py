"""Isthmus trains one model on machines that are far apart, unequal, and joined by slow links.

The packages, from the top: `cli`, `report`, `simulator` and `runtime`, `job`, `training`, `models`, `data`,
`protocol`, `planners`, `cost`, `plan`, `graph`, `fleet`. See ARCHITECTURE.md.
"""

__version__ = "0.1.0"
