"""An exported model, pushed to the Hugging Face hub that HF_ENDPOINT names, with the token HF_TOKEN."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from isthmus.errors import UserError
from isthmus.extensions import import_extra


class HubRepository:
    """A repository of this name, to push to. UserError for a name that is none, and where no token is known."""

    def __init__(self, name: str, *, public: bool = False) -> None:
        """`public` is of a repository that is made: one that is there stays as it is."""
        if not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", name):
            raise UserError(f"--push: got {name!r}, expected USER/NAME")
        self._hub: Any = import_extra("huggingface_hub", "isthmus export --push")
        if self._hub.get_token() is None:
            raise UserError(f"--push {name}: no token: set HF_TOKEN, or run `hf auth login`")
        self._name, self._public = name, public

    def push(self, directory: Path, message: str) -> str:
        """Make the repository if it is not there, and commit the directory's files; returns its address. UserError."""
        api = self._hub.HfApi()
        try:
            made = api.create_repo(self._name, private=not self._public, exist_ok=True)
            api.upload_folder(repo_id=self._name, folder_path=str(directory), commit_message=message)
        except Exception as e:  # of httpx, of the hub, of its checks of names
            raise UserError(f"--push {self._name}: {_reason(e)}") from None
        return str(made)


def _reason(error: Exception) -> str:
    """Return the hub's reason, without the request's number and address."""
    said, response = getattr(error, "server_message", None), getattr(error, "response", None)
    if said and response is not None:
        return f"refused with {response.status_code}: {' '.join(str(said).split())}"
    return " ".join(str(error).split()) or type(error).__name__
