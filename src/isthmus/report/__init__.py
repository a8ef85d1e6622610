"""Reports: terminal tables, live progress, pictures, and the summaries that machines read."""

from isthmus.report.comparison import ComparedPlan, Comparison, Headroom, compared_table, least_headroom, ranked
from isthmus.report.explanation import Explanation, Improvement, explain, explanation_text, improvements, linked_devices
from isthmus.report.fleet_tables import fleets_table, planners_table
from isthmus.report.measured import during, last_period, memory_table, memory_use, run_summary
from isthmus.report.pictures import draw_faults, draw_loss, draw_plan, draw_timeline
from isthmus.report.progress import PlanningProgress, Progress
from isthmus.report.summary import (
    ComparisonSummary,
    DeviceMemoryUse,
    DeviceUse,
    LinkUse,
    PlanComparison,
    PlanSummary,
    StageSummary,
    Transfer,
    comparison_summary,
    plan_summary,
    prediction_error,
)
from isthmus.report.tables import comparison_table, plan_table, verdict_table
from isthmus.report.what_if_table import WhatIf, WhatIfRow, what_if_table

__all__ = [
    "ComparedPlan",
    "Comparison",
    "ComparisonSummary",
    "DeviceMemoryUse",
    "DeviceUse",
    "Explanation",
    "Headroom",
    "Improvement",
    "LinkUse",
    "PlanComparison",
    "PlanSummary",
    "PlanningProgress",
    "Progress",
    "StageSummary",
    "Transfer",
    "WhatIf",
    "WhatIfRow",
    "compared_table",
    "comparison_summary",
    "comparison_table",
    "draw_faults",
    "draw_loss",
    "draw_plan",
    "draw_timeline",
    "during",
    "explain",
    "explanation_text",
    "fleets_table",
    "improvements",
    "last_period",
    "least_headroom",
    "linked_devices",
    "memory_table",
    "memory_use",
    "plan_summary",
    "plan_table",
    "planners_table",
    "prediction_error",
    "ranked",
    "run_summary",
    "verdict_table",
    "what_if_table",
]
