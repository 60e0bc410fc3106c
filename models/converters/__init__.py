"""Models of other libraries, to ours and back: one layout of transformers a file.

    roformer.py    RoFormer (Su et al. 2021, arXiv 2104.09864): masked and causal language models, classifiers
    bert.py        BERT (Devlin et al. 2019, arXiv 1810.04805): masked language models, classifiers
    llama.py       Llama (Touvron et al. 2023, arXiv 2302.13971), Mistral, Qwen2: causal language models

A layout is a module that says which fields of config.json it understands, which network they name, and what each
weight is called on both sides. What it cannot honour it refuses by name; what it leaves out it tells. `reading` and
`writing` do the rest, for all layouts alike.
"""

from models.converters.reading import is_foreign, read_transformers
from models.converters.writing import write_transformers

__all__ = ["is_foreign", "read_transformers", "write_transformers"]
