"""python -m cupyflash, one module a sub-command."""
