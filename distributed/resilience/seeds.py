"""Seeds that make a random state in a checkpoint unnecessary."""

import zlib


def seed_from(*values: object) -> int:
    """One 32-bit seed from several values, because torch's CPU generator uses no more bits.

    Seeded by (seed, step, rank) at every step, dropout is the same after a resume.
    """
    return zlib.crc32(repr(values).encode())
