"""Reports: terminal tables, live progress, pictures, and the summaries that machines read."""

from isthmus.report.fleet_tables import fleet_table, planners_table, topologies_table
from isthmus.report.loss import draw_loss
from isthmus.report.progress import Progress
from isthmus.report.summary import (
    ComparisonSummary,
    DeviceUse,
    LinkUse,
    PlanSummary,
    StageSummary,
    Transfer,
    comparison_summary,
    plan_summary,
    prediction_error,
)
from isthmus.report.tables import comparison_table, plan_table
from isthmus.report.timeline import draw_timeline

__all__ = [
    "ComparisonSummary",
    "DeviceUse",
    "LinkUse",
    "PlanSummary",
    "Progress",
    "StageSummary",
    "Transfer",
    "comparison_summary",
    "comparison_table",
    "draw_loss",
    "draw_timeline",
    "fleet_table",
    "plan_summary",
    "plan_table",
    "planners_table",
    "prediction_error",
    "topologies_table",
]
