"""The plugins that travel with a model: none of this package's own.

In a saved folder another file of this name imports the plugins that lie beside it; see `saving.py`.
"""
