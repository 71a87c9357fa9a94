"""Score and mask functions: traced once, differentiated, written as NumPy and CUDA."""
