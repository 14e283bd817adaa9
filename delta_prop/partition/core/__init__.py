"""The core of a partition: what is done for each row and each batch, without I/O, clock or await."""
