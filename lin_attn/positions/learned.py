"""Learned absolute positions (Gehring et al. 2017, arXiv 1705.03122; BERT, GPT-2): one vector a position."""

from torch import Tensor, nn


class LearnedPositions(nn.Module):
    """A table of max_length vectors of size d_model, added to the embeddings."""

    def __init__(self, max_length: int, d_model: int) -> None:
        super().__init__()
        if max_length < 1:
            raise ValueError(f"max_length is {max_length}; wanted at least 1")
        self.table = nn.Embedding(max_length, d_model)

    def forward(self, positions: Tensor, end: int) -> Tensor:
        """Vectors (…, d_model) of integer positions (…) that all lie below end.

        Raises:
            ValueError: if end is beyond the table. (It is given, not read off the tensor, to spare a device its wait.)
        """
        if end > self.table.num_embeddings:
            raise ValueError(
                f"the sequence reaches position {end - 1}; learned positions end at max_length - 1 = "
                f"{self.table.num_embeddings - 1}. Train with a greater max_length, or with rope, which has no end"
            )
        vectors: Tensor = self.table(positions)
        return vectors
