"""Implementations of an op for one kind of hardware, and nothing else; `lin_attn.ops` says what they compute."""
