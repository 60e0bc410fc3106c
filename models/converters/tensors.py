"""The tensors of a folder of transformers, by names that do not depend on who saved them.

They are in model.safetensors, or in several files that model.safetensors.index.json lists; older folders have
pytorch_model.bin, of which nothing is unpickled but tensors. A name's prefixes (the base model's, "model.", "module.")
depend on the class that saved it, and LayerNorm's weight and bias were once called gamma and beta.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from models.pretrained.folder import read_json
from models.pretrained.weights import WEIGHTS, listed, open_weights, read_tensor

PICKLED = "pytorch_model.bin"
WRAPPERS = ("module.", "_orig_mod.", "model.")


class Tensors:
    """Finds tensors by their plain names, and remembers which were asked for.

    Args:
        folder: that holds the files.
        prefix: of the base model, such as "bert.".

    Raises:
        ValueError: if there are no weights, a file is missing or damaged, or two tensors have one plain name.
    """

    def __init__(self, folder: Path, prefix: str) -> None:
        self.path, files = _files(folder)
        self._of: dict[str, tuple[Any, str, Path]] = {}
        for path, names in files.items():
            file = _pickled(path) if path.suffix == ".bin" else open_weights(path)
            found = set(file.keys())
            if names is not None and found != names:
                odd = sorted(found ^ names)
                raise ValueError(f"{path} and {self.path.name} differ in {listed(odd)}; wanted files of one model")
            for name in sorted(found):
                plain = plain_name(name, prefix)
                if plain in self._of:
                    raise ValueError(f"{path}: {name} and {self._of[plain][1]} are both {plain}; wanted one of them")
                self._of[plain] = (file, name, path)
        self.unused = set(self._of)

    def __contains__(self, name: str) -> bool:
        return name in self._of

    def __iter__(self) -> Iterator[str]:
        return iter(self._of)

    def original(self, name: str) -> str:
        """What the file calls a tensor."""
        return self._of[name][1]

    def read(self, name: str) -> Tensor:
        """A tensor of the file, which counts as used."""
        self.unused.discard(name)
        file, original, path = self._of[name]
        return file[original] if isinstance(file, dict) else read_tensor(file, original, path)


def plain_name(name: str, prefix: str) -> str:
    """A tensor's name without prefixes, in the words of today."""
    while (start := next((p for p in (*WRAPPERS, prefix) if name.startswith(p)), None)) is not None:
        name = name.removeprefix(start)
    for old, new in ((".gamma", ".weight"), (".beta", ".bias")):
        if name.endswith(old):
            name = name.removesuffix(old) + new
    return name


def _files(folder: Path) -> tuple[Path, dict[Path, set[str] | None]]:
    """The file that tells where the weights are, and each file with the names it has to hold; None for any."""
    for whole in (WEIGHTS, PICKLED):
        index = folder / f"{whole}.index.json"
        if (folder / whole).is_file():
            return folder / whole, {folder / whole: None}
        if index.is_file():
            places = read_json(index, f"{folder} has no weights").get("weight_map")
            if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
                raise ValueError(f"{index} has no weight_map of names and files")
            if any(Path(place).name != place for place in places.values()):
                raise ValueError(f"{index} names a file outside its folder")
            return index, {folder / place: {n for n, p in places.items() if p == place} for place in places.values()}
    raise ValueError(f"{folder} has neither {WEIGHTS} nor {PICKLED}, nor an index of several; wanted a model's weights")


def _pickled(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    found: Any = None
    for mmap in (True, False):  # files from before 2020 cannot be mapped
        try:
            found = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
            break
        except Exception as error:  # what the reader makes of arbitrary bytes has no common type
            reason = error
    else:
        raise ValueError(f"{path} is no whole file of tensors alone ({type(reason).__name__})") from reason
    if not isinstance(found, dict) or not all(isinstance(value, Tensor) for value in found.values()):
        raise ValueError(f"{path} holds other things than tensors by name; wanted a model's weights")
    return found
