"""A run's folder: who owns it, what it says about itself, and the inputs it keeps."""
