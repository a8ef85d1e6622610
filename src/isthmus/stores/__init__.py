"""Remote stores of runs: any file system that fsspec knows, and the uploads to it."""

from isthmus.stores.hub import hub_silence
from isthmus.stores.store import RemoteStoreError, Store, is_url
from isthmus.stores.store_file import StoreFile
from isthmus.stores.uploader import (
    OWNER,
    Owner,
    StoreConfig,
    Uploader,
    commits_in,
    commits_of,
    is_document,
    newest_first,
    number_of,
    read_owner,
)

__all__ = [
    "OWNER",
    "Owner",
    "RemoteStoreError",
    "Store",
    "StoreConfig",
    "StoreFile",
    "Uploader",
    "commits_in",
    "commits_of",
    "hub_silence",
    "is_document",
    "is_url",
    "newest_first",
    "number_of",
    "read_owner",
]
