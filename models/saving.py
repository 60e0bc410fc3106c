"""The methods by which a model is given away."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from models.training import TrainedModel


class Shareable:
    """save_pretrained and push_to_hub, for TrainedModel."""

    def save_pretrained(
        self,
        folder: str | os.PathLike[str],
        *,
        dtype: torch.dtype | None = None,
        summary: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> None:
        """Writes the model and its tokenizer as a folder that `from_pretrained` reads (docs/pretrained.md).

        The folder is made beside its place and renamed into it: a process that is killed leaves no half of one.

        Args:
            folder: new or empty.
            dtype: to store the weights in, such as torch.bfloat16; their own by default.
            summary: what is known of the training, for config.json and the model card: description, data, steps,
                tokens, bits_per_byte, metrics, decode_tokens_per_second, hardware, command, license. What is left out
                is left out there.
            overwrite: replace a folder that save_pretrained wrote.

        Raises:
            ValueError: if the folder has files already, or an argument is not as above.
            CheckpointWriteError: if it could not be written; what lay there before is as it was.
        """
        from models.pretrained.folder import write_folder

        place = Path(folder).expanduser().resolve()
        write_folder(cast("TrainedModel", self), place, dtype=dtype, summary=summary, overwrite=overwrite)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        dtype: torch.dtype | None = None,
        summary: Mapping[str, Any] | None = None,
        private: bool | None = None,
        revision: str | None = None,
        message: str | None = None,
    ) -> str:
        """Puts the folder of `save_pretrained` on the Hugging Face hub, where `from_pretrained(repo_id)` finds it.

        Args:
            repo_id: OWNER/NAME; made if it is not there. What it had before stays in its history.
            dtype: as in save_pretrained.
            summary: as in save_pretrained.
            private: of a repository that is made; the account's default by default.
            revision: branch to commit to; the main one by default.
            message: of the commit.

        Returns:
            The commit's address.

        Raises:
            ValueError: if the hub cannot be reached or does not let us.
        """
        from models.pretrained.hub import upload

        model = cast("TrainedModel", self)
        return upload(model, repo_id, dtype=dtype, summary=summary, private=private, revision=revision, message=message)
