"""python -m cupyflash: one module for each sub-command."""
