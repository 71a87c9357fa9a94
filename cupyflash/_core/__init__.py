"""Arrays, strides, dtypes, threads: what needs neither CuPy nor a kernel."""
