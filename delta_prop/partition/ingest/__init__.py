"""What a partition knows before the order: the bounded queue, origins, vector heads, known ids."""
