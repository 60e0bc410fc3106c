"""Pretrained folders on the Hugging Face hub, by huggingface_hub: its cache, its log-in, its offline mode."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from models.pretrained.folder import CARD, FILES, write_folder

if TYPE_CHECKING:
    from models.training import TrainedModel

PREFIX = "hub:"
# What a folder of transformers may have besides, for models.converters.
FOREIGN_FILES = ("model.safetensors.index.json", "model-*.safetensors", "vocab.txt", "special_tokens_map.json")
PICKLED_FILES = ("pytorch_model.bin", "pytorch_model.bin.index.json", "pytorch_model-*.bin")


def download(repo_id: str, revision: str | None) -> Path:
    """The folder of a model of the hub, from the cache where it is there; only files of a model are fetched.

    Raises:
        ValueError: if it cannot be had.
    """
    from huggingface_hub import constants, snapshot_download

    def fetch(patterns: tuple[str, ...]) -> Path:
        return Path(snapshot_download(repo_id, revision=revision, allow_patterns=list(patterns)))

    try:
        folder = fetch((*FILES, *FOREIGN_FILES))
        if (folder / "config.json").is_file() and not any(folder.glob("*.safetensors")):
            folder = fetch((*FILES, *FOREIGN_FILES, *PICKLED_FILES))
        return folder
    except Exception as error:  # the library raises many types
        reason, at = _first_line(error), "" if revision is None else f" at revision {revision}"
    raise ValueError(
        f"cannot load {PREFIX}{repo_id}{at}, which is no folder here either ({reason}); if the hub cannot be reached, "
        f"load it once with network access into the cache {constants.HF_HUB_CACHE}, or set HF_HOME to a folder that "
        "holds it"
    )


def upload(
    model: "TrainedModel",
    repo_id: str,
    *,
    dtype: torch.dtype | None = None,
    summary: Mapping[str, Any] | None = None,
    private: bool | None = None,
    revision: str | None = None,
    message: str | None = None,
) -> str:
    """Puts a model on the hub; see `TrainedModel.push_to_hub`."""
    from huggingface_hub import HfApi

    repo_id = repo_id.removeprefix(PREFIX)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "model"
        write_folder(model, folder, dtype=dtype, summary=summary, name=repo_id)
        written = {path.name for path in folder.iterdir()}
        api = HfApi()
        try:
            api.create_repo(repo_id, private=private, exist_ok=True)
            commit: Any = api.upload_folder(
                repo_id=repo_id,
                folder_path=folder,
                revision=revision,
                commit_message=message or f"A {type(model).__name__} of lin-attn",
                # What an earlier model left and this one has not, its tokenizer for example; history keeps it.
                delete_patterns=[name for name in FILES if name not in written and name != CARD] or None,
            )
        except Exception as error:  # the library raises many types
            raise ValueError(
                f"cannot put the model on the hub as {repo_id!r} ({_first_line(error)}); wanted OWNER/NAME, network "
                "access, and a log-in that may write there (`hf auth login`)"
            ) from error
    return str(commit.commit_url)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
