"""`plan_cases` stands one folder up; pytest only looks beside a test file."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parent.parent))
