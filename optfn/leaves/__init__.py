"""What a leaf of a tree may be, and how a rule meets it: dense, row-sparse, packed, masked."""
