"""What lies on disk: FASTA in, training shards, embedding files out (numpy and h5py only)."""


class FormatError(ValueError):
    """A file that is damaged or is not what it should be; the message is one line that says what to do."""
