"""Data sets with deterministic, random access to any samples of any columns."""

from isthmus.data.dataset import ColumnSpec, Dataset, Split
from isthmus.data.order import SampleOrder
from isthmus.data.registry import DataSpec, dataset_kinds, load_dataset

__all__ = ["ColumnSpec", "DataSpec", "Dataset", "SampleOrder", "Split", "dataset_kinds", "load_dataset"]
