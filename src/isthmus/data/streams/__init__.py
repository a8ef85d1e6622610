"""Data that are read while a run goes on, never as a whole: Parquet files and tar shards, here or behind a URL."""
