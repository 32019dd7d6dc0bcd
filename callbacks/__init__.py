"""Lightning callbacks that watch each layer: one a file, the file named after the class."""
