"""Engines of clusters.

Ray takes 127.0.0.1 for this machine's address in its network, unless a variable says that there is no network. The
variable is read when Ray is imported.
"""

import os

os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_USAGE_STATS_ENABLED="0")
