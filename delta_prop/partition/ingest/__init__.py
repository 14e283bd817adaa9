"""The state of a partition before the order: the bounded queue, origins, vector heads, known ids."""
