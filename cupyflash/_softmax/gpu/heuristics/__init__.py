"""How each kind of kernel is launched for a problem."""
