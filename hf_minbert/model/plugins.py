"""The plugins that are uploaded with a model. The package itself has none.

In a saved folder, another file with this name imports the plugins in the folder; see `saving.py`.
"""
