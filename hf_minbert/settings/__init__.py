"""The keys of a recipe, each declared once, and the code that reads and writes recipes.

Nothing here imports torch or transformers, so that mistakes in a recipe are reported at once.
"""
