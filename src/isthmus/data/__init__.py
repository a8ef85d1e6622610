"""Data sets with deterministic, random access to any samples of any columns."""

from isthmus.data.dataset import ColumnSpec, Dataset, JoinedDataset, Split, batch_at, sample_order
from isthmus.data.order import JoinedOrder, SampleOrder
from isthmus.data.registry import DataSpec, dataset_kinds, describe_dataset, load_dataset

__all__ = [
    "ColumnSpec",
    "DataSpec",
    "Dataset",
    "JoinedDataset",
    "JoinedOrder",
    "SampleOrder",
    "Split",
    "batch_at",
    "dataset_kinds",
    "describe_dataset",
    "load_dataset",
    "sample_order",
]
