"""The shapes of a server's batches: few padded lengths and batch sizes, all of which it compiles before it answers."""

from __future__ import annotations


def served_length(length: int) -> int:
    """Return the padded length of a served text: 8, 16, 24, 32, 48, 64, 96, 128, ... tokens."""
    power = 8
    while power < length:
        if power >= 16 and length <= power * 3 // 2:
            return power * 3 // 2
        power *= 2
    return power


def served_lengths(limit: int) -> list[int]:
    """Return the padded lengths of texts of up to `limit` tokens."""
    return sorted({min(served_length(length), limit) for length in range(1, limit + 1)})


def batch_sizes(largest: int) -> list[int]:
    """Return the padded sizes of batches of up to `largest` texts: powers of two, and `largest`."""
    return sorted({min(1 << power, largest) for power in range(largest.bit_length() + 1)})
