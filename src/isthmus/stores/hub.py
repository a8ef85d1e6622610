"""The Hugging Face hub: asked once whether it answers. Its library asks a silent one six times, over half a minute."""

from __future__ import annotations

from typing import Literal

from isthmus.extensions import import_extra


def hub_silence(repository: str, file: str, kind: Literal["model", "dataset"]) -> str:
    """Return why the hub does not answer, in a line; "" where it says anything at all, or is not to be asked."""
    hub = import_extra("huggingface_hub", "the hub")
    if hub.constants.HF_HUB_OFFLINE:
        return ""
    try:
        hub.get_hf_file_metadata(hub.hf_hub_url(repository, file, repo_type=kind))
    except (hub.errors.HfHubHTTPError, hub.errors.FileMetadataError, ValueError):
        return ""  # an answer, or no id of the hub: the library's own words are better
    except Exception as e:  # no network, no such host, no answer in time: each version's HTTP library has its own
        address = hub.constants.ENDPOINT
        return f"{address} does not answer: {' '.join(str(e).split()) or type(e).__name__}"
    return ""
