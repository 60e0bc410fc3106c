"""Pretrained models, a folder each: written by `save_pretrained`, and read whole or not at all by `from_pretrained`.

    config.json            what the model is: class, network, options, tokenizer, dtype, how it was trained
    model.safetensors      its weights, tied ones once
    tokenizer.json         of a model whose tokens are not bytes, with tokenizer_config.json naming its end token
    README.md              the model card, for people
    SHA256SUMS             of the files above but the card: `sha256sum -c SHA256SUMS` reads it too

What each file here does: `folder` the format, `place` writing it at once, `weights` tensors, `checksums` damage, `card`
the README, `loading` names to models, `hub` the Hugging Face hub. Layouts of other libraries are read by
`models.converters`.
"""

from models.pretrained.folder import read_config
from models.pretrained.loading import available, from_pretrained

__all__ = ["available", "from_pretrained", "read_config"]
