"""The run itself: building it, stepping it, keeping it alive."""
