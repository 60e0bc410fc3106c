"""Who can compute `linear_attention`, and on this machine in particular.

    reference   quadratic, for clarity: the truth that the others are tested against
    chunked     pure PyTorch, O(N), on every device

Naming one never falls back to another; "auto" takes the fastest that can do what is asked.
"""

BACKENDS = ("auto", "reference", "chunked")


def usable_backends() -> dict[str, str | None]:
    """Each backend with None if it is usable here, or with the reason why it is not."""
    return {"reference": None, "chunked": None}  # both are plain PyTorch
