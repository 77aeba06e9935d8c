"""A run on a page: what its folder holds, said and drawn."""
