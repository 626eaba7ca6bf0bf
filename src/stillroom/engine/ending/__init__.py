"""What a finished run is judged by and leaves behind."""
