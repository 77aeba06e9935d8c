"""The keys of a recipe, each declared once, and recipes read and written.

Nothing here imports torch or transformers, so that a mistake in a recipe is answered at once.
"""
